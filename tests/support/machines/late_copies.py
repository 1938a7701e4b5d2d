"""A GPU that is always late, without a GPU: tensors on the CPU that say they are there, and copies that arrive late."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

HOST, GPU = torch.device("cpu"), torch.device("xpu", 0)

#: What the host reads before a copy has arrived: no flag, no scale, no sum of squares.
BEFORE = -7

#: Reads on the host, which wait for the GPU if the tensor is there.
_READS = (Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.cpu)


class _OnGpu(Tensor):
    """A tensor that says it is on :data:`GPU`."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class LateCopies(TorchFunctionMode):
    """Until the host waits for the GPU, what was copied from there without waiting has not arrived.

    The host waits where it reads a value of the GPU, or copies one without ``non_blocking``. A copy that arrives
    overwrites what the host has written to the same memory meanwhile. ``late`` counts these copies.
    """

    def __init__(self) -> None:
        super().__init__()
        self.late = 0
        self._under_way: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return GPU if isinstance(args[0], _OnGpu) else func(*args)
        if func in _READS and isinstance(args[0], _OnGpu):
            self._arrive()
        if func is Tensor.copy_:
            return self._copied(args[1], func(*args, **kwargs), bool(kwargs.get("non_blocking")))
        if func is Tensor.to and _device_of(args, kwargs) is not None:
            return self._moved(*args, **kwargs)
        there = _device_of((), kwargs)
        if there == GPU:
            kwargs["device"] = HOST
        on_gpu = there == GPU if there is not None else _any_on_gpu((args, kwargs))
        result = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, _on_gpu, result) if on_gpu else result

    def _moved(self, source: Tensor, *args: Any, non_blocking: bool = False, copy: bool = False, **kwargs: Any) -> Any:
        device = _device_of((source, *args), kwargs)
        if (device == GPU) is isinstance(source, _OnGpu) and not copy:
            return source
        result = source.as_subclass(Tensor).clone()
        return _on_gpu(result) if device == GPU else self._copied(source, result, non_blocking)

    def _copied(self, source: Any, target: Tensor, non_blocking: bool) -> Tensor:
        if not isinstance(source, _OnGpu) or isinstance(target, _OnGpu):
            return target
        if not non_blocking:
            self._arrive()
            return target
        self.late += 1
        self._under_way.append((target, target.clone()))
        return target.fill_(BEFORE)

    def _arrive(self) -> None:
        for target, value in self._under_way:
            target.copy_(value)
        self._under_way.clear()


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """The device that a call names, as keyword or after the tensor."""
    named = kwargs.get("device", args[1] if len(args) > 1 else None)
    return torch.device(named) if isinstance(named, (str, torch.device)) else None


def _any_on_gpu(values: Iterable[Any]) -> bool:
    return any(isinstance(value, _OnGpu) for value in pytree.tree_leaves(values))


def _on_gpu(value: Tensor) -> Tensor:
    return value if isinstance(value, _OnGpu) else value.as_subclass(_OnGpu)
