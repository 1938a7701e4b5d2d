"""Option "nonfinite" where a graph is called again before its backward: a backward belongs to its own forward."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.checks.exhaustive import each_once, exhaustive
from support.oracles.like_autocast import compile_with
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fxamp


class Steep(torch.autograd.Function):
    """Its gradient is infinite where its input is large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient / (x < 100)


def _steep(x: Tensor, w: Tensor) -> Tensor:
    result: Tensor = Steep.apply(x * w)  # type: ignore[no-untyped-call]
    return result


def _written(x: Tensor, w: Tensor, kept: Tensor) -> None:
    kept.add_(_steep(x, w))


#: What a graph returns, or writes to its last input: the whole result, views of it, or nothing with a gradient.
RETURNED: dict[str, Callable[..., Any]] = {
    "a result": lambda x, w, kept: _steep(x, w),
    "a loss": lambda x, w, kept: _steep(x, w).sum(),
    "a view": lambda x, w, kept: _steep(x, w).view(2, 2)[0],
    "views of one": lambda x, w, kept: (_steep(x, w)[:2].t(), x.detach()),
    "a view and its base": lambda x, w, kept: (h := _steep(x, w), h.view(2, 2)),
    "an input that is written": _written,
}


def _backward(results: Any, kept: Tensor) -> None:
    sum(
        value.sum() for value in tree_leaves((results, kept)) if isinstance(value, Tensor) and value.requires_grad
    ).backward()


def _batch(size: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.full((4,), size, requires_grad=True), torch.ones(4), torch.ones(4)


#: The sizes of the batches, the order of the backwards, and the steps that have a finding.
ORDERS = [
    ((1e3, torch.nan), [0], [1]),  # the newer forward is named too
    ((1.0, 1e3, 1.0), [0, 1, 2], [2]),
    ((1e3, 1.0, 1e3), [2, 1, 0], [3, 1]),
]


@each_once(
    "case, calls, lowering",
    exhaustive(RETURNED, always=list(RETURNED)[::2]),
    ORDERS,
    ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)],
)
def test_a_backward_has_the_step_of_its_forward(
    case: str, calls: tuple[Sequence[float], Sequence[int], Sequence[int]], lowering: str
) -> None:
    sizes, order, steps = calls
    compiled = compile_with(lambda *args: RETURNED[case](*args), lowering, policy="auto", nonfinite="log")
    batches = [_batch(size) for size in sizes]
    results = [compiled(*batch) for batch in batches]
    before = {found.region for found in fxamp.report(compiled).nonfinite}
    assert before == ({"forward"} if torch.nan in sizes else set())
    for at in order:
        _backward(results[at], batches[at][2])
        assert batches[at][0].grad is not None
        assert bool(batches[at][0].grad.isfinite().all()) == (sizes[at] == 1)
    (found,) = (one for one in fxamp.report(compiled).nonfinite if one.region == "backward")
    assert (found.step, found.last, found.times) == (steps[0], steps[-1], len(steps))
