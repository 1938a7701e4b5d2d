"""The ops of a training step on CUDA, by FakeTensors; only for a process whose torch is prepared for it."""

import copy
from collections import Counter
from typing import Any

import torch
from corpus import WIDE
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from zoo import MODELS, build

from fxamp.tools.bench.cost.simulated_gpu import compiling_for_gpu
from fxamp.tools.common.running_ops import RunningOps
from fxamp.torch_private.parts.fx import TracingContext

#: Views by another name, and copies of constants, which a graph makes by another op.
_FREE = ("aten::detach", "aten::_unsafe_view", "aten::lift_fresh", "aten::lift_fresh_copy")


class _Ops(RunningOps):  # type: ignore[no-untyped-call]
    """Counts the ops that compute, each with the dtypes that it reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def ran(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        written = _dtypes(result)
        compiling = TracingContext.try_get() is not None
        if not (compiling or op.is_view or op._schema.name in _FREE) and written:
            self.counts[f"{op}({_dtypes(args)}) -> {written}"] += 1


def ops_beside_autocast(_: None, name: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return the ops of a step of the model ``name`` in bfloat16: eager autocast's, and fxamp's with policy "auto"."""
    model, batch = build({**MODELS, **WIDE}[name])
    with compiling_for_gpu(), FakeTensorMode(allow_non_fake_inputs=True):
        model, batch = _on_gpu(model), pytree.tree_map_only(torch.Tensor, _fake, batch)
        twin = copy.copy(model)
        twin.compile(backend="fxamp", options={"lowering": "eager"})
        return _ops(model, batch), _ops(twin, batch)


def _ops(model: torch.nn.Module, batch: dict[str, Any]) -> dict[str, int]:
    def loss() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            result: torch.Tensor = model(**batch).loss
        return result

    loss()  # compiles
    model.zero_grad(set_to_none=True)
    with _Ops() as ops:
        loss().backward()
    return dict(ops.counts)


def _on_gpu(model: torch.nn.Module) -> torch.nn.Module:
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, value in store.items():
                if value is not None:
                    fake = _fake(value)
                    parameter = isinstance(value, torch.nn.Parameter)
                    store[name] = torch.nn.Parameter(fake, value.requires_grad) if parameter else fake
    return model


def _fake(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")


def _dtypes(values: Any) -> str:
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return ", ".join(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
