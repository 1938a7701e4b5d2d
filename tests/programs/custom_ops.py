"""Ops of a library. It registers what autocast does for ``low``, in its dtype, ``wide``, in float32, and ``half``.

Autocast does not know ``halved`` and ``accumulate``.
"""

from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("programs", "FRAGMENT")

_KEYS = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}


def _product(x: Tensor, w: Tensor) -> Tensor:
    """Products of 16-bit values are summed in float32; of two dtypes, one is float64."""
    wide = torch.float64 if torch.float64 in (x.dtype, w.dtype) else torch.float32
    if x.dtype is not w.dtype and wide is torch.float32:
        raise TypeError(f"{x.dtype} and {w.dtype}")
    return (x.to(wide) @ w.to(wide)).to(x.dtype)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    return _product(gradient, w.t()), _product(x.t(), gradient)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.to(dtype)


def _register(name: str, dtype: torch.dtype | None) -> None:
    """Define an op; autocast casts its inputs to ``dtype``, to its own dtype if that is None."""
    LIBRARY.define(f"{name}(Tensor x, Tensor w) -> Tensor")
    LIBRARY.impl(name, _product, "CompositeExplicitAutograd")
    torch.library.register_autograd(f"programs::{name}", _backward, setup_context=_save, lib=LIBRARY)

    def under_autocast(x: Tensor, w: Tensor) -> Tensor:
        own = dtype or torch.get_autocast_dtype(x.device.type)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEYS[x.device.type])):
            result: Tensor = getattr(torch.ops.programs, name)(_cast(x, own), _cast(w, own))
        return result

    for key in _KEYS.values():
        LIBRARY.impl(name, under_autocast, key.name)


def _halved(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 0.5, x.sum(-1)


def _halved_backward(ctx: Any, half: Tensor, total: Tensor) -> Tensor:
    return half * 0.5 + total.unsqueeze(-1)


def _accumulate(total: Tensor, x: Tensor) -> None:
    total.add_(x)


LIBRARY.define("halved(Tensor x) -> (Tensor, Tensor)")
LIBRARY.impl("halved", _halved, "CompositeExplicitAutograd")
torch.library.register_autograd("programs::halved", _halved_backward, lib=LIBRARY)
LIBRARY.define("accumulate(Tensor(a!) total, Tensor x) -> ()")
LIBRARY.impl("accumulate", _accumulate, "CompositeExplicitAutograd")

_register("low", None)
_register("wide", torch.float32)
_register("half", torch.float16)
