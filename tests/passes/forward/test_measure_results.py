"""The pass measure-results on tiny captured graphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.bench_graph import workbench
from support.machines.lacks import needs_results_alone
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fxamp.graph import graph_output
from fxamp.passes.forward.measure_results import MeasureResults
from fxamp.passes.shared.magnitudes import MEASURED, largest_after


def test_each_informative_floating_value_is_measured() -> None:
    def program(x: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        product = x.mm(x.t()).mul_(2)
        half = product.half()
        return half.float(), product[0], at + 1

    x = torch.tensor([[1.0, 2.0], [3.0, 400.0]])
    bench = workbench(program, x, torch.arange(3))
    assert bench.golden("measure-results", MeasureResults()).modified == 4
    *_, numbers = bench.captured.module(x, torch.arange(3))
    names = graph_output(bench.captured.module.graph).meta[MEASURED]
    assert numbers.dtype is torch.float32 and not numbers.requires_grad
    assert dict(zip(names, numbers.tolist(), strict=True)) == {
        "l_x_": 400.0,
        "mm": 160009.0,
        "mul_": 320018.0,
        "select": 1606.0,
    }


def test_a_graph_without_floating_values_does_not_change() -> None:
    bench = workbench(lambda x: (x + 1, x.to(torch.bool)), torch.arange(3))
    bench.assert_unchanged_by(MeasureResults())


def test_checkpoints_return_what_is_measured_inside() -> None:
    def program(x: Tensor) -> Tensor:
        return checkpoint(lambda y: y.exp().log(), x, use_reentrant=False) + 1

    bench = workbench(program, torch.ones(2, requires_grad=True))
    bench.run(MeasureResults())
    names = graph_output(bench.captured.module.graph).meta[MEASURED]
    assert names == ("l_x_", "body_0/exp", "body_0/log", "add")
    *_, numbers = bench.captured.module(torch.full((2,), 100.0, requires_grad=True))
    assert numbers.tolist() == [100.0, torch.inf, torch.inf, torch.inf]


def unread_checkpoint(x: Tensor) -> Tensor:
    def body(y: Tensor) -> None:
        y.exp()

    checkpoint(body, x, use_reentrant=False)
    return x + 1


def unread_values(x: Tensor) -> Tensor:
    y = checkpoint(lambda y: y.exp(), x, use_reentrant=False)
    torch.where(y > 0, y, y).log()
    return x + 1


@pytest.mark.parametrize("program", [unread_checkpoint, unread_values])
def test_values_that_nothing_depends_on_are_not_measured(program: Callable[[Tensor], Tensor]) -> None:
    bench = workbench(program, torch.ones(2, requires_grad=True))
    bench.run(MeasureResults())
    assert graph_output(bench.captured.module.graph).meta[MEASURED] == ("l_x_", "add")


class Steep(torch.autograd.Function):
    """Its forward and its backward make values of their own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp() + 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient / x


@needs_results_alone
def test_functions_return_what_is_measured_inside() -> None:
    bench = workbench(lambda x: Steep.apply(x) * 2, torch.ones(2, requires_grad=True))
    assert bench.golden("measure-results-functions", MeasureResults(backwards=True)).modified == 4
    names = graph_output(bench.captured.module.graph).meta[MEASURED]
    assert [name.rpartition("/")[2] for name in names] == ["l_x_", "exp", "add", "mul"]
    *_, numbers = bench.captured.module(torch.full((2,), 100.0, requires_grad=True))
    assert numbers.tolist() == [100.0, torch.inf, torch.inf, torch.inf]


def test_masks_and_empty_tensors_are_measured_as_they_are() -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        return x.masked_fill(x > 0, -torch.inf), x[:0], torch.zeros(2), torch.full((2,), torch.nan)

    bench = workbench(program, torch.ones(2))
    bench.run(MeasureResults())
    names = graph_output(bench.captured.module.graph).meta[MEASURED]
    assert names == ("l_x_", "masked_fill", "zeros", "full")
    *_, numbers = bench.captured.module(torch.ones(2))
    assert str(numbers.tolist()) == "[1.0, inf, 0.0, nan]"


def test_an_input_is_measured_behind_its_first_conversions_reader_but_before_it_is_written() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        z = x[0] + 1
        half = x.half() * z.half()
        y.mul_(2)
        return half + y.half()

    x, y = torch.ones(2, 2), torch.full((2, 2), 3.0)
    bench = workbench(program, x, y)
    bench.run(MeasureResults())
    nodes = list(bench.captured.module.graph.nodes)
    of_x, of_y = (
        next(node for node in nodes if node.target is torch.ops.aten.detach.default and node.args[0] is nodes[at])
        for at in (0, 1)
    )
    product, written = (next(node for node in nodes if node.name == name) for name in ("mul", "mul_"))
    assert nodes.index(of_y) < nodes.index(product) < nodes.index(of_x) < nodes.index(written)
    *_, numbers = bench.captured.module(x, y)
    assert numbers.tolist()[:2] == [1.0, 3.0]


def test_a_value_is_measured_in_the_shape_in_which_it_is_read() -> None:
    """Kernels of other shapes are not fused; what is read twice is measured as it is."""

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        once, twice = x.mm(x), x.exp()
        return once.view(2, 2, 4).sin(), twice.view(2, 2, 4) + twice.sum()

    bench = workbench(program, torch.ones(4, 4))
    bench.run(MeasureResults())
    detached = bench.captured.module.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default)
    shapes = {node.args[0].name: tuple(node.meta["val"].shape) for node in detached}
    assert shapes["view"] == (2, 2, 4) and shapes["exp"] == (4, 4) and "mm" not in shapes


def test_what_follows_is_measured_only_if_what_it_follows_from_is_not() -> None:
    def program(x: Tensor) -> Tensor:
        return (x * 2).half().tanh().t() ** 2 + torch.full((2, 2), 6e4, dtype=torch.float16) * 2

    bench = workbench(program, torch.ones(2, 2))
    bench.run(MeasureResults())
    assert graph_output(bench.captured.module.graph).meta[MEASURED] == ("l_x_", "mul_1", "add")


#: Ops that are not measured if what they read is: their largest magnitude follows from that.
FOLLOWING: dict[str, Callable[[Tensor], Tensor]] = {
    "a product": lambda x: x * -250,
    "a small product": lambda x: x * 1e-3,
    "a quotient": lambda x: x / 0.004,
    "a square": lambda x: x**2,
    "a power": lambda x: x**3.0,
    "tanh": lambda x: torch.tanh(x),
    "erf": lambda x: torch.erf(x),
    "atan": lambda x: torch.atan(x),
    "asinh": lambda x: torch.asinh(x),
}

#: As above, but they are measured: zero times infinity is no number, and signs and least magnitudes decide.
FREE: dict[str, Callable[[Tensor], Tensor]] = {
    "a product with zero": lambda x: x * 0,
    "a reciprocal": lambda x: x**-1,
    "a root": lambda x: x**0.5,
    "a sum with a number": lambda x: x + 1,
    "a product of two": lambda x: x * x,
    "exp": lambda x: torch.exp(x),
}


@pytest.mark.parametrize("op", [*FOLLOWING, *FREE])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_magnitude_that_follows_is_that_of_the_result(op: str, dtype: torch.dtype) -> None:
    bench = workbench(FOLLOWING.get(op) or FREE[op], torch.ones(2, dtype=dtype))
    *_, node, _ = bench.captured.module.graph.nodes
    follows = largest_after(node)
    assert (follows is not None) == (op in FOLLOWING)
    if follows is None:
        return
    for number in (0.0, 0.3, 37.0, 3e4, torch.finfo(dtype).max, torch.inf, torch.nan):
        made = FOLLOWING[op](torch.tensor([0.1, -number], dtype=dtype)).abs().amax().item()
        expected = follows(max(torch.tensor([number, 0.1], dtype=dtype).tolist()))
        rounded = torch.tensor(expected, dtype=torch.float64).to(dtype).item()
        assert rounded == pytest.approx(made, rel=2 * torch.finfo(dtype).eps, nan_ok=True), number
