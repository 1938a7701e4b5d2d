"""An absent GPU for Inductor to compile for."""

import contextlib
import os
import tempfile
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.config as inductor_config
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from fxamp.torch_dtypes import NARROW
from fxamp.torch_private.parts.dynamo import device_interface
from fxamp.torch_private.parts.functorch import config as functorch_config
from fxamp.torch_private.parts.inductor import _triton as torch_triton
from fxamp.torch_private.parts.inductor import compile_fx

aten = torch.ops.aten

#: The properties of a GPU that Inductor reads.
H100 = types.SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    L2_cache_size=50 << 20,
    gcnArchName="",
)


@contextlib.contextmanager
def compiling_for_gpu() -> Iterator[None]:
    """Inside, Inductor compiles for "cuda", taken to be an H100, without caches, and benchmarks nothing."""
    with contextlib.ExitStack() as stack:
        stack.callback(list.clear, _registered())
        for owner, name, value in _replacements():
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(
            inductor_config.patch(
                fx_graph_cache=False, force_disable_caches=True, compile_threads=1, shape_padding=False
            )
        )
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder))
        yield


class _Driver:
    """Triton's active driver, with what Triton's cache keys need."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


def _replacements() -> list[tuple[Any, str, Any]]:
    """torch's queries about the device, with answers. Raises AttributeError if torch renames one."""
    cuda, interface, still = torch.cuda, device_interface.CudaInterface, staticmethod
    return [
        (cuda, "get_device_properties", lambda *_: H100),
        (cuda, "get_device_capability", lambda *_: (H100.major, H100.minor)),
        (cuda, "current_device", lambda: 0),
        (cuda, "device_count", lambda: 1),
        (cuda, "is_available", lambda: False),  # else PYTORCH_NVML_BASED_CUDA_CHECK makes it follow the count
        (cuda, "is_bf16_supported", lambda *_, **__: True),
        (cuda.amp.common, "amp_definitely_not_available", lambda: False),
        (compile_fx, "get_cuda_device_context", lambda _: contextlib.nullcontext()),
        (interface, "get_device_properties", still(lambda *_: H100)),
        (interface, "is_available", still(lambda: True)),
        (interface, "current_device", still(lambda: 0)),
        (interface, "device_count", still(lambda: 1)),
        (interface, "is_bf16_supported", still(lambda *_, **__: True)),
        (interface, "synchronize", still(lambda *_: None)),
        (interface, "exchange_device", still(lambda *_: 0)),
        (interface, "maybe_exchange_device", still(lambda *_: 0)),
        (interface.Worker, "get_device_properties", still(lambda *_: H100)),
        (torch_triton, "triton_hash_with_backend", lambda: "none"),
        (triton.runtime.driver, "_active", _Driver()),
    ]


def _library(key: str) -> Any:
    return torch.library.Library("aten", "IMPL", key)  # type: ignore[no-untyped-call]


def _registered() -> list[torch.library.Library]:
    """Give "cuda" what Inductor computes while it compiles (constants), and the GPU build's choice of attention.

    A CUDA build has all three; with ``allow_override`` these come before them. The registration ends when the libraries
    are freed.
    """
    cuda, composite = _library("CUDA"), _library("CompositeImplicitAutograd")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cuda.impl("empty.memory_format", _empty, allow_override=True)
        cuda.impl("empty_strided", _empty_strided, allow_override=True)
        composite.impl("scaled_dot_product_attention", _attention, allow_override=True)
    return [cuda, composite]


def _empty(size: Sequence[int], dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return torch.empty(size, dtype=dtype, device="cpu")


def _empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Flash attention for 16 bits without a mask, else the memory-efficient one: as a GPU build picks on sm_90."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    result: tuple[Tensor, ...]
    if attn_mask is None and query.dtype in NARROW:
        result = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)
    else:
        result = aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
        )
    return result[0]
