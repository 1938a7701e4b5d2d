"""Refuse to run a step that writes to tensors which it was not given."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import TorchDispatchMode

from fxamp.optim.errors import OtherWriteError


class NoOtherWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises OtherWriteError before an op writes to a tensor that has values and was not made while this is active.

    Tensors on "meta" and fake ones have no values.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By address of the storage; they stay alive, so that no other gets the address of one of them.
        self._made: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for at, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._require_made(args[at] if at < len(args) else kwargs.get(argument.name))
        result = func(*args, **kwargs)
        # A tensor of Python numbers is made before the op that the mode sees.
        fresh = func is torch.ops.aten.lift_fresh.default
        given = set() if fresh else {_address(tensor) for tensor in _tensors([*args, *kwargs.values()])}
        for tensor in _tensors(result):
            if _address(tensor) not in given:
                self._made[_address(tensor)] = tensor.untyped_storage()
        return result

    def _require_made(self, written: Any) -> None:
        with_values = [tensor for tensor in _tensors(written) if not tensor.is_meta and not is_fake(tensor)]
        if any(_address(tensor) not in self._made for tensor in with_values):
            raise OtherWriteError


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if isinstance(value, Tensor) and value.layout is torch.strided else []


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
