"""Runs one call under the real torch.autocast on FakeTensors and sees which dtypes reach the op, and which come out.

The dispatcher's autocast kernels sit above autograd. With autograd's keys excluded, the op that autocast calls arrives
whole in a TorchDispatchMode, however it would be decomposed later: its arguments are what executes.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from fxamp.capture.autocast_state import autocast_state
from oracle.dtypes import Dtypes, input_dtypes, output_dtypes


@dataclass(frozen=True)
class Observation:
    """What happened to one call.

    ``executed`` is the overload that autocast ran and ``inputs`` the dtypes of its floating inputs; ``dtype`` is its
    dtype argument. ``outputs`` are the dtypes of all its outputs. ``refused`` is autocast's own error;
    ``kernel_error`` that of the op itself, on what autocast gave it (the other fields are still known).
    """

    executed: str = ""
    inputs: Dtypes = ()
    dtype: torch.dtype | None = None
    outputs: Dtypes = ()
    refused: Exception | None = None
    kernel_error: Exception | None = None


def observe(
    op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str, dtype: torch.dtype
) -> Observation:
    """Return what the real autocast for ``device`` with 16-bit ``dtype`` makes of a call on FakeTensors."""
    with autocast(device, dtype):
        with torch._C._AutoDispatchBelowAutograd(), _Stop(op) as mode:
            try:
                op(*args, **kwargs)
            except _Reached:
                pass
            except Exception as error:  # autocast's kernels raise plain RuntimeErrors, and a missing driver its own
                return Observation(refused=error)
            else:
                raise AssertionError(f"{op} returned without being called")
        try:
            return replace(mode.call, outputs=output_dtypes(op(*args, **kwargs)))
        except Exception as error:  # fake kernels raise whatever they like
            return replace(mode.call, kernel_error=error)


@contextmanager
def autocast(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Turn the dispatcher's autocast on for a device that need not be there (``torch.autocast`` would ask for it)."""
    try:
        with autocast_state(device, True, dtype):
            yield
    finally:
        torch.clear_autocast_cache()


class _Reached(Exception):
    """Thrown out of the dispatcher as soon as the op itself is reached."""


class _Stop(TorchDispatchMode):
    def __init__(self, op: OpOverload) -> None:
        super().__init__()
        self.packet = op.overloadpacket
        self.call = Observation()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket is not self.packet:
            return func(*args, **kwargs)
        self.call = Observation(str(func), input_dtypes(args, kwargs), dtype_argument(func, args, kwargs))
        raise _Reached


def dtype_argument(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """Return the value of a call's ``dtype`` argument, None if it has none."""
    named = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False))
    dtype: torch.dtype | None = {**named, **kwargs}.get("dtype")
    return dtype
