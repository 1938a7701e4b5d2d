"""The pass scale-backward on tiny backward graphs: golden texts, contract, and values."""

import pytest
import torch
from backward_graphs import backward_graph, mode_of
from support.checks.bench_graph import assert_unchanged, golden_pass
from support.checks.equality import assert_equal
from support.checks.exhaustive import each_once
from support.checks.golden_text import assert_golden
from torch import Tensor
from torch.fx import GraphModule

from fxamp.capture import Captured
from fxamp.errors import PassError
from fxamp.graph import format_graph, graph_output
from fxamp.passes.backward.scale_backward import CHECKS, FLAGGED, ScaleBackward, gradients, tangents
from fxamp.passes.base import Context, Result
from fxamp.passes.shared import unscale_and_check
from fxamp.pipeline import run_passes

INF = float("inf")


def run(gm: GraphModule, check: str = "ops", norm: bool = False) -> Result:
    context = Context(mode_of(gm))
    (record,) = run_passes(Captured(gm, mode_of(gm)), context, ScaleBackward(check, norm))
    return Result(record.modified, record.counts)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape, dtype=dtype, requires_grad=True)


def mixed(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A weight's gradient through a widening cast, a float32 one, a float16 tangent and a float32 one."""
    product = x.half() @ w.half().t()
    return product, (x * 2).sum()


def arguments(gm: GraphModule) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    return [torch.randn(v.shape, generator=generator).to(v.dtype) for v in values]


def with_scale(gm: GraphModule, values: list[Tensor], scale: float) -> list[Tensor]:
    """The arguments as they come when the loss was scaled: float16 tangents hold the scale; then the scale itself."""
    names = {node.name for node in tangents(gm)}
    inputs = gm.graph.find_nodes(op="placeholder")
    scaled = [
        (value.float() * scale).half() if node.name in names and value.dtype == torch.float16 else value
        for node, value in zip(inputs, values, strict=False)
    ]
    return [*scaled, torch.tensor(scale)]


def flag_of_each(gm: GraphModule, flags: Tensor) -> list[bool]:
    """Whether the flag of each gradient is set, in the gradients' order; some have the same flag."""
    covered = graph_output(gm.graph).meta[FLAGGED]
    found = {at: bool(flag) for every, flag in zip(covered, flags, strict=True) for at in every}
    return [found[at] for at in sorted(found)]


@pytest.mark.parametrize("check", CHECKS)
def test_what_is_written(check: str) -> None:
    gm = backward_graph(mixed, ones(2, 3), ones(4, 3))
    record = golden_pass(f"backward/scale-backward-{check}", gm, Context(mode_of(gm)), ScaleBackward(check, False))
    assert (record.modified, record.counts) == (4, {"tangents": 2, "gradients": 2})
    assert graph_output(gm.graph).meta[FLAGGED] == ((0,), (1,))


def twins(x: Tensor, one: Tensor, two: Tensor, other: Tensor) -> Tensor:
    """``one`` and ``two`` have one and the same gradient."""
    return (x.half() * 3).float() * 2 + one + two + other * other


@pytest.mark.parametrize("check", CHECKS)
def test_the_sum_of_squares_counts_every_gradient(check: str) -> None:
    gm = backward_graph(twins, ones(2, 3), ones(2, 3), ones(2, 3), ones(2, 3))
    run(gm, check, norm=True)
    assert_golden(f"backward/scale-backward-{check}-norm", format_graph(gm))
    scale = torch.tensor(2.0**10)
    *gradients, flags, square = gm(*[torch.ones_like(value) for value in arguments(gm)[:-1]], scale)
    assert (
        len(gradients) == 4
        and len(flags) == (1 if check == "shared" else 4)
        and square.dtype == torch.float32
        and square.shape == ()
    )
    assert square.item() == sum(gradient.square().sum().item() for gradient in gradients) == 6 * (36 + 1 + 1 + 4)
    assert_unchanged(gm, Context(mode_of(gm)), ScaleBackward(check, True))


def test_a_graph_without_gradients_stays_as_it_is() -> None:
    gm = backward_graph(mixed, ones(2, 3), ones(4, 3))
    graph_output(gm.graph).meta["desc"] = [None, None]
    assert_unchanged(gm, Context(mode_of(gm)), ScaleBackward("ops"))


def test_a_graph_without_descriptors_is_refused() -> None:
    gm = backward_graph(mixed, ones(2, 3), ones(4, 3))
    del graph_output(gm.graph).meta["desc"]
    with pytest.raises(PassError, match=r"scale-backward.*no descriptors"):
        run(gm)


def test_gradients_without_tangents_are_refused() -> None:
    gm = backward_graph(mixed, ones(2, 3), ones(4, 3))
    for tangent in tangents(gm):
        del tangent.meta["desc"]
    with pytest.raises(PassError, match="no tangents"):
        run(gm)


def test_the_promise_is_checked() -> None:
    gm = backward_graph(mixed, ones(2, 3), ones(4, 3))
    run(gm)
    step, context = ScaleBackward(), Context(mode_of(gm))
    assert step.ensures(gm, context) is None
    graph_output(gm.graph).meta[FLAGGED] = ((1,),)
    assert "gradients at (0, 1), but flags for ((1,),)" in str(step.ensures(gm, context))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("scale", [2.0**10, 3.0, 2.0**-3])
def test_gradients_come_out_true_and_flagged(check: str, scale: float) -> None:
    plain = backward_graph(mixed, ones(2, 3), ones(4, 3))
    inputs = arguments(plain)
    expected = plain(*inputs)
    run(plain, check)
    *got, flags = plain(*with_scale(plain, inputs, scale))
    assert flags.tolist() == [False, False]
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        # float16's rounding of what went through it; with a power of two there is none but near the subnormals.
        torch.testing.assert_close(a, b, rtol=2 * torch.finfo(torch.float16).eps, atol=2.0**-24)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("bad", [INF, -INF, float("nan")])
def test_a_flag_is_raised_for_just_the_gradient_that_overflowed(check: str, bad: float) -> None:
    """``x`` is reached by both tangents, ``w`` by the first alone."""
    gm = backward_graph(mixed, ones(2, 3), ones(4, 3))
    inputs = arguments(gm)
    names = [node.name for node in tangents(gm)]
    at = [node.name for node in gm.graph.find_nodes(op="placeholder")].index(names[1])
    inputs[at] = torch.full_like(inputs[at], bad)
    run(gm, check)
    *_, flags = gm(*inputs, torch.tensor(2.0))
    assert flags.tolist() == [True, False]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("scale", [0.0, INF, 2.0**20])
def test_a_scale_that_spoils_gradients_raises_flags(check: str, scale: float) -> None:
    gm = backward_graph(mixed, ones(2, 3), ones(4, 3))
    inputs = arguments(gm)
    run(gm, check)
    *got, flags = gm(*with_scale(gm, inputs, scale))
    assert [bool(flag) for flag in flags] == [not g.isfinite().all() for g in got]
    assert flags.any()


@pytest.mark.parametrize("check", CHECKS)
def test_a_scale_beyond_float16_is_taken_out_of_a_float16_tangent(check: str) -> None:
    gm = backward_graph(lambda x: x.half() * 2, ones(2))
    run(gm, check)
    true = torch.tensor([2.0**-20, 2.0**-10])
    gradient, flags = gm((true * 2.0**18).half(), torch.tensor(2.0**18))
    assert torch.equal(gradient, 2 * true) and not flags.any()


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("check", CHECKS)
def test_float16_enters_and_leaves_with_the_scale_and_is_checked(check: str, norm: bool) -> None:
    gm = backward_graph(lambda x, y: x * y, ones(2, dtype=torch.float16), ones(2, dtype=torch.float16))
    assert run(gm, check, norm).counts == {"tangents": 1, "gradients": 2}
    inputs = [torch.tensor(values, dtype=torch.float16) for values in ([2.0, 2.0], [3.0, 3e4], [1.0, 4.0])]
    first, second, flags, *square = gm(*inputs, torch.tensor(8.0))
    assert sorted([first.tolist(), second.tolist()]) == [[2.0, 8.0], [3.0, INF]]
    each = flag_of_each(gm, flags)
    assert each == ([True, True] if check == "shared" else [INF in value.tolist() for value in (first, second)])
    assert first.dtype == second.dtype == torch.float16
    assert [value.item() for value in square] == [0.0] * norm


def test_a_float16_gradient_is_no_part_of_the_norm() -> None:
    gm = backward_graph(lambda x, y: x * y.half(), ones(2, dtype=torch.float16), ones(2))
    run(gm, norm=True)
    *gradients, flags, square = gm(*with_scale(gm, [torch.ones_like(v) for v in arguments(gm)[:-1]], 4.0))
    wide = [gradient for gradient in gradients if gradient.dtype == torch.float32]
    assert len(wide) == 1 and not flags.any()
    assert square.item() == wide[0].square().sum().item() == 2.0


def test_all_checks_give_the_same_bits() -> None:
    results = []
    for check in CHECKS:
        gm = backward_graph(mixed, ones(2, 3), ones(4, 3))
        inputs = arguments(gm)
        run(gm, check)
        results.append(gm(*inputs, torch.tensor(3.0)))
    for own in zip(*results, strict=True):
        assert all(torch.equal(own[0], value) and own[0].dtype == value.dtype for value in own)


def test_the_kernel_reads_a_weight_s_gradient_before_it_is_widened() -> None:
    gm = backward_graph(mixed, ones(2, 3), ones(4, 3))
    run(gm, "kernel")
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.fxamp.check_unscale.default)
    assert [source.meta["val"].dtype for source in node.args[0]] == [torch.float32, torch.float16]


def test_a_launch_unscales_so_many_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that 16-bit gradients do not all wait for the last one; a gradient with more is alone."""
    monkeypatch.setattr(unscale_and_check, "_MOST", 12)
    inputs = [ones(2, 3), ones(6), ones(5, 4), ones(2)]
    gm = backward_graph(lambda *values: tuple(value * 2 for value in values), *inputs)
    run(gm, "kernel", norm=True)
    kernels = gm.graph.find_nodes(op="call_function", target=torch.ops.fxamp.check_unscale_norm.default)
    assert [[source.meta["val"].numel() for source in kernel.args[0]] for kernel in kernels] == [[6, 6], [20], [2]]
    for bad in range(4):
        incoming = [torch.full_like(value, INF if at == bad else 3.0) for at, value in enumerate(inputs)]
        *gradients, flags, square = gm(*incoming, torch.tensor(4.0))
        assert flag_of_each(gm, flags) == [at == bad for at in range(4)] and not square.isfinite()
        assert [value[value.isfinite()].tolist() == [6.0] * value.numel() for value in gradients].count(False) == 1
    *_, square = gm(*(torch.full_like(value, 3.0) for value in inputs), torch.tensor(4.0))
    assert square == 36 * (6 + 6 + 20 + 2)


def used_twice(x: Tensor, w: Tensor) -> Tensor:
    """The gradient of ``w`` is a sum; that of ``x`` is a product's."""
    return (x @ w).sum() + w.square().sum()


@each_once("norm, bad", [False, True], [1.0, INF])
def test_a_large_sum_is_unscaled_and_checked_where_it_is_made(norm: bool, bad: float) -> None:
    """The oracle is the same graph with plain ops alone."""
    outcomes = []
    for check in CHECKS:
        gm = backward_graph(used_twice, ones(2, 1024), ones(1024, 1024))
        inputs = [torch.full_like(value, bad) if value.dim() == 0 else value for value in arguments(gm)]
        run(gm, check, norm)
        kernels = gm.graph.find_nodes(op="call_function", target=torch.ops.fxamp.check_unscale.default)
        kernels += gm.graph.find_nodes(op="call_function", target=torch.ops.fxamp.check_unscale_norm.default)
        read = [source.meta["val"].shape for kernel in kernels for source in kernel.args[0]]
        assert read == ([(2, 1024)] if check == "kernel" else [])
        outcomes.append(gm(*inputs, torch.tensor(3.0)))
    plain, *others = outcomes
    assert bool(plain[2].any()) == (bad == INF)
    for other in others:
        assert torch.equal(plain[2].bool(), other[2].bool())
        assert_equal(plain[:2], other[:2], equal_nan=True)
        if norm:
            torch.testing.assert_close(plain[3], other[3], equal_nan=True)


def test_a_tangent_that_is_the_gradient_and_one_gradient_for_two_inputs() -> None:
    gm = backward_graph(lambda a, b: a + b, ones(2), ones(2))
    assert run(gm).counts == {"tangents": 1, "gradients": 2}
    tangent = torch.tensor([1.0, 3e38])
    first, second, flags = gm(tangent, torch.tensor(4.0))
    assert first is second
    assert flags.tolist() == [True, True]
    first, _, flags = gm(tangent, torch.tensor(0.5))
    assert torch.equal(first, tangent) and not flags.any()


def test_small_gradients_of_one_shape_share_a_flag() -> None:
    """Not those of another dtype or shape, nor large ones."""
    small, wide, large = (3,), (2, 2), (65, 64)
    shapes = [small, wide, small, large, large, small]
    inputs = [ones(*shape) for shape in shapes] + [ones(3, dtype=torch.float64)]
    for bad in range(len(inputs)):
        gm = backward_graph(lambda *values: tuple(value * 2 for value in values), *inputs)
        run(gm, "shared")
        assert graph_output(gm.graph).meta[FLAGGED] == ((0, 2, 5), (1,), (3,), (4,), (6,))
        incoming = [torch.full_like(value, INF if at == bad else 1.0) for at, value in enumerate(inputs)]
        *gradients, flags = gm(*incoming, torch.tensor(4.0))
        assert all(bool(value.isfinite().all()) == (at != bad) for at, value in enumerate(gradients))
        group = next(every for every in graph_output(gm.graph).meta[FLAGGED] if bad in every)
        assert flag_of_each(gm, flags) == [at in group for at in range(len(inputs))]


def test_complex_and_double_values_are_scaled_too() -> None:
    def program(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a * 2, b * 3

    inputs = ones(2, dtype=torch.complex64), ones(2, dtype=torch.float64)
    for check in CHECKS:
        gm = backward_graph(program, *inputs)
        assert run(gm, check).counts == {"tangents": 2, "gradients": 2}
        big = torch.tensor([1e300, 1.0], dtype=torch.float64)
        first, second, flags = gm(torch.tensor([1 + 1j, 2j]), big, torch.tensor(8.0))
        assert torch.equal(first, torch.tensor([2 + 2j, 4j])) and torch.equal(second, big * 3)
        assert flags.tolist() == [False, False]
        _, _, flags = gm(torch.tensor([1 + 1j, complex(0, INF)]), big, torch.tensor(8.0))
        raised = [at for at, flag in zip(graph_output(gm.graph).meta[FLAGGED], flags, strict=True) if flag]
        assert raised == [(0,)]


def test_what_is_no_gradient_stays_as_it_is() -> None:
    gm = backward_graph(mixed, ones(2, 3), ones(4, 3))
    output = graph_output(gm.graph)
    output.meta["desc"] = [output.meta["desc"][0], None]
    gradient = output.args[0][1]
    run(gm)
    assert gradients(gm) == [0]
    assert graph_output(gm.graph).args[0][1] is gradient
