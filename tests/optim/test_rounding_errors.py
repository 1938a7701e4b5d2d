"""Steps that keep what the rounding of a 16-bit parameter loses: compiled, they keep it too, not zeros."""

import pytest
import torch
from support.checks.exhaustive import each_once, exhaustive
from support.programs.written_steps import LOWERINGS, Body, State, stepped
from torch import nn


def compensated(parameter: nn.Parameter, state: State, rate: float) -> None:
    """Kahan's sum, as torchdistx.AnyPrecisionAdamW has it: what the parameter's rounding loses is in the state."""
    state["lost"].add_(parameter.grad, alpha=-rate / 1000)
    old = parameter.clone()
    parameter.add_(state["lost"])
    state["lost"].add_(old.sub_(parameter))


def compensated_as_lists(parameter: nn.Parameter, state: State, rate: float) -> None:
    """The same by ops on lists of tensors."""
    lost, old = [state["lost"]], [parameter.clone()]
    torch._foreach_add_(lost, [parameter.grad], alpha=-rate / 1000)  # type: ignore[list-item]
    torch._foreach_add_([parameter], lost)
    torch._foreach_sub_(old, [parameter])
    torch._foreach_add_(lost, old)


def two_sum(parameter: nn.Parameter, state: State, rate: float) -> None:
    """Knuth's sum, whose error is exact whichever term is larger."""
    update = state["lost"] - rate / 1000 * parameter.grad  # type: ignore[operator]
    new = parameter + update
    added = new - parameter
    state["lost"].copy_((parameter - (new - added)) + (update - added))
    parameter.copy_(new)


def split(parameter: nn.Parameter, state: State, rate: float) -> None:
    """The parameter and its state are the upper and the lower half of a float32."""
    whole = parameter.float() + state["lost"].float() - rate / 1000 * parameter.grad.float()  # type: ignore[union-attr]
    parameter.copy_(whole.to(parameter.dtype))
    state["lost"].copy_(whole + (-parameter.float()))


@each_once("body, lowering", [compensated, compensated_as_lists, two_sum, split], LOWERINGS)
@pytest.mark.parametrize("dtype", exhaustive([torch.bfloat16, torch.float16], always=[torch.bfloat16]))
def test_rounding_errors_are_not_zeros(body: Body, dtype: torch.dtype, lowering: str) -> None:
    own, compiled = (stepped(body, lambda p: {"lost": torch.zeros_like(p)}, way, dtype) for way in ("eager", lowering))
    assert all(value.any() for value in own[3:])
    # The sum of both: the rounding of one more update can move an element to its neighbour.
    sums = ([p.double() + lost.double() for p, lost in zip(run[:3], run[3:], strict=True)] for run in (compiled, own))
    torch.testing.assert_close(*sums, rtol=torch.finfo(dtype).eps ** 2, atol=torch.finfo(dtype).eps * 1e-3)
