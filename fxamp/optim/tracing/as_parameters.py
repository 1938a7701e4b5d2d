"""Stand-ins that behave like the optimizer's parameters, even if its step reads more than their values."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fxamp.optim.errors import NotCompilableError

_OWNER = "_fxamp_owner"


class _StandIn:
    """``isinstance`` takes it for a parameter. It has its owner's ``requires_grad``, but no other attribute of it."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    _is_param = True  # makes isinstance(stand_in, nn.Parameter) true

    @property
    def requires_grad(self) -> bool:
        owner = vars(self).get(_OWNER)
        return owner is not None and bool(owner.requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        raise NotCompilableError("its step changes the requires_grad of a parameter")

    def __getattr__(self, name: str) -> Any:
        if hasattr(vars(self).get(_OWNER), name):
            raise NotCompilableError(
                f"its step reads {name!r} of a parameter; accepted: settings of its group, and state"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if not hasattr(Tensor, name):
            raise NotCompilableError(f"its step sets {name!r} of a parameter; accepted: state")
        super().__setattr__(name, value)


class _PlainStandIn(_StandIn, Tensor):  # type: ignore[misc, override]
    pass


class _FakeStandIn(_StandIn, FakeTensor):  # type: ignore[misc, override]
    pass


def as_parameters(stand_ins: Sequence[Tensor], owners: Sequence[Tensor]) -> None:
    """Make each of ``stand_ins`` answer as its owner among the optimizer's parameters."""
    for stand_in, owner in zip(stand_ins, owners, strict=True):
        # The class changes in place, because a tensor of functorch cannot be wrapped.
        stand_in.__class__ = _FakeStandIn if isinstance(stand_in, FakeTensor) else _PlainStandIn
        vars(stand_in)[_OWNER] = owner
