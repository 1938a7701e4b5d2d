import math
from collections.abc import Callable

import pytest
import torch
from support.checks.bench_graph import policy, workbench
from torch.fx.experimental import proxy_tensor
from torch.nn import functional

from fxamp.graph import argument, is_composite
from fxamp.passes.forward import expand_composites
from fxamp.passes.forward.annotate_rules import AnnotateRules
from fxamp.passes.forward.expand_composites import ExpandComposites
from fxamp.passes.forward.insert_casts import InsertCasts
from fxamp.policy import Category, Rule


def test_a_composite_that_holds_a_ruled_op_is_replaced_by_its_parts() -> None:
    bench = workbench(lambda a, b: torch.einsum("ij,jk->ik", a, b), torch.ones(2, 3), torch.ones(3, 4))
    assert bench.golden("expand-composites", ExpandComposites()).modified == 1
    assert "bmm" in bench.text


def test_a_composite_without_a_ruled_op_stays_whole() -> None:
    bench = workbench(lambda a: torch.nn.functional.dropout(a).reshape(-1), torch.ones(2, 3))
    bench.assert_unchanged_by(ExpandComposites())


def test_a_composite_with_a_rule_of_its_own_is_left_to_it() -> None:
    einsum = policy(Rule("einsum", Category.LOWER_PRECISION_FP, ("einsum", "bmm")))
    bench = workbench(lambda a, b: torch.einsum("ij,jk->ik", a, b), torch.ones(2, 3), torch.ones(3, 4), under=einsum)
    assert bench.run(ExpandComposites()).modified == 0


def test_a_composite_that_the_device_has_a_kernel_for_is_left_to_it() -> None:
    under = policy(Rule("inside", Category.FP32, ("sigmoid",)))
    bench = workbench(lambda g, x: torch.ops.aten.silu_backward(g, x), torch.ones(2, 3), torch.ones(2, 3), under=under)
    assert bench.run(ExpandComposites()).modified == 0
    assert "silu_backward" in bench.text


def test_parts_of_parts_are_found() -> None:
    deep = policy(Rule("log", Category.FP32, ("log_softmax",)))
    bench = workbench(
        torch.nn.functional.cross_entropy, torch.ones(2, 3), torch.zeros(2, dtype=torch.int64), under=deep
    )
    bench.run(ExpandComposites())
    assert "log_softmax" in bench.text and "cross_entropy" not in bench.text


@pytest.mark.parametrize("cast", [Category.FP32, Category.LOWER_PRECISION_FP])
@pytest.mark.parametrize("captured", [torch.float32, torch.bfloat16])
def test_a_part_that_gets_its_inputs_dtype_gets_the_wider_one(captured: torch.dtype, cast: Category) -> None:
    """In a cross-entropy ``log_softmax`` gets the dtype of the logits, which is another one after casts."""
    sums = Rule("sums", Category.FP32_SET_OPT_DTYPE, ("log_softmax.int",))
    under = policy(Rule("products", cast, ("linear",)), sums, Rule("losses", Category.FP32, ("nll_loss",)))
    x, w, target = torch.ones(2, 3, dtype=captured), torch.ones(4, 3, dtype=captured), torch.zeros(2, dtype=torch.int64)
    bench = workbench(lambda x, w, t: functional.cross_entropy(functional.linear(x, w), t), x, w, target, under=under)
    bench.run(ExpandComposites(), AnnotateRules(), InsertCasts())
    (node,) = [node for node in bench.captured.module.graph.nodes if "log_softmax" in str(node.target)]
    wide = captured is torch.float32 or cast is Category.FP32
    assert argument(node, "dtype") is (torch.float32 if wide else torch.bfloat16)


def test_the_parts_carry_the_users_source_line() -> None:
    bench = workbench(lambda a, b: torch.einsum("ij,jk->ik", a, b), torch.ones(2, 3), torch.ones(3, 4))
    bench.run(ExpandComposites())
    calls = [node for node in bench.captured.module.graph.nodes if node.op == "call_function"]
    assert calls and all("torch.einsum" in node.meta["stack_trace"] for node in calls)


def test_a_composite_that_is_valid_only_under_autocast_is_expanded_under_it() -> None:
    def mixed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ij,jk->ik", a @ a, b)

    bench = workbench(mixed, torch.ones(3, 3), torch.ones(3, 4), ambient=torch.bfloat16)
    bench.run(ExpandComposites())
    assert "bmm" in bench.text


def _batch(*sizes: int) -> torch.Tensor:
    """A tensor whose first size is a symbol."""
    x = torch.ones(*sizes)
    torch._dynamo.mark_dynamic(x, 0)
    return x


WEIGHT = torch.ones(8, 8)
SYMBOLIC: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "group_norm": lambda x: torch.nn.functional.group_norm(x @ WEIGHT, 2),
    "einsum": lambda x: torch.einsum("bi,ij->bj", x, WEIGHT),
    "a size as an argument": lambda x: torch.tensordot(x.reshape(x.shape[0], 2, 4).flatten(1), WEIGHT, 1),
    "interpolate": lambda x: torch.nn.functional.interpolate(x[None], size=x.shape[0] * 2),
    "inner": lambda x: torch.inner(x, WEIGHT),
}


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the pass traces."""
    calls: list[object] = []

    def make_fx(call: object, **options: object) -> object:
        calls.append(call)
        return proxy_tensor.make_fx(call, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(expand_composites, "make_fx", make_fx)
    return calls


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_sizes_are_not_looked_into(name: str, traced: list[object]) -> None:
    program = SYMBOLIC[name]

    def repeated(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(program(x) for _ in range(3))

    compiled = torch.compile(repeated, backend="fxamp", options={"policy": "cpu-bfloat16", "lowering": "eager"})
    for result in compiled(_batch(6, 8)):
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(result, program(torch.ones(6, 8)).float())
    levels, calls = 2, 3
    assert len(traced) <= levels * (1 + calls)  # once to find out, and once for each call that is replaced


def test_sizes_that_a_program_computes_are_inputs_of_a_decomposition(caplog: pytest.LogCaptureFixture) -> None:
    def padded(x: torch.Tensor) -> torch.Tensor:
        after = math.ceil((x.shape[0] - 1) / 2) * 4 - x.shape[0]
        return functional.pad(x.t() @ x, (0, after), mode="replicate") * (1 + 2**-10)  # a bfloat16 stays as it is

    compiled = torch.compile(padded, backend="fxamp", options={"lowering": "eager"})
    for rows in (6, 7, 9):
        x = _batch(rows, 8)
        with torch.autocast("cpu", torch.bfloat16):
            result, expected = compiled(x), padded(x)
        assert torch.equal(result, expected)
    assert "cannot trace" not in caplog.text


def test_sizes_that_depend_on_values_are_no_obstacle() -> None:
    """torch asks of an RNN's input whether it is empty, which nobody knows of a boolean mask's result."""
    weights = [torch.randn(4, 8), torch.randn(4, 4), torch.randn(4), torch.randn(4)]

    def masked(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        rows = x[keep]
        state = torch.zeros(1, rows.shape[0], 4)
        return torch.rnn_tanh(rows, state, weights, True, 1, 0.0, False, False, True)[0]

    options = {"policy": "cpu-bfloat16", "lowering": "eager"}
    compiled = torch.compile(masked, backend="fxamp", options=options, fullgraph=True)
    x = torch.randn(4, 3, 8)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for kept in ([True, False, True, True], [False, True, False, False], [False] * 4):
            result = compiled(x, torch.tensor(kept))
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(result, masked(x, torch.tensor(kept)).float())


def test_a_composite_that_cannot_be_traced_stays_whole_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    runs = [True]

    def squared(x: torch.Tensor) -> torch.Tensor:
        if not runs:
            raise RuntimeError("no values here")
        return x @ x

    with torch.library._scoped_library("fxamp_test", "FRAGMENT") as library:
        library.define("squared(Tensor x) -> Tensor")
        library.impl("squared", squared, "CompositeImplicitAutograd")
        bench = workbench(lambda a: torch.ops.fxamp_test.squared(a), torch.ones(8, 8))
        runs.clear()
        bench.assert_unchanged_by(ExpandComposites())
    assert "squared.default at " in caplog.text and "cannot trace what it computes: no values here" in caplog.text


def test_questions_about_a_tensor_are_no_composites() -> None:
    aten = torch.ops.aten
    questions = [aten.sym_size.int, aten.sym_numel.default, aten.sym_stride.int, aten.is_nonzero.default]
    assert all(op._can_decompose() and not is_composite(op) for op in [*questions, aten.item.default])
    assert is_composite(aten.einsum.default) and is_composite(aten.split.sizes)


def test_what_eager_mode_runs_as_one_kernel_is_no_composite() -> None:
    assert torch.ops.aten.upsample_nearest2d.default._can_decompose()
    assert not is_composite(torch.ops.aten.upsample_nearest2d.default)


def test_an_op_that_stands_in_its_own_decomposition_stays_whole(traced: list[object]) -> None:
    with torch.library._scoped_library("fxamp_test", "FRAGMENT") as library:
        library.define("halved(Tensor x) -> Tensor")

        def halved(x: torch.Tensor) -> torch.Tensor:
            half = x.shape[0] // 2
            return torch.mm(x, x.t()) if half == 0 else torch.ops.fxamp_test.halved(x[:half])

        library.impl("halved", halved, "CompositeImplicitAutograd")
        bench = workbench(lambda a: torch.ops.fxamp_test.halved(a), torch.ones(8, 8))
        before = bench.text
        assert "halved" in before and bench.run(ExpandComposites()).modified == 0
        assert bench.text == before and len(traced) == 1


def test_each_kind_of_call_is_traced_once_at_every_depth(traced: list[object]) -> None:
    deep = policy(Rule("none", Category.FP32, ("no_such_op",)))

    def losses(x: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
        return [torch.nn.functional.cross_entropy(x, target) for _ in range(5)]

    inputs = torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)
    bench = workbench(losses, *inputs, under=deep)
    bench.run(ExpandComposites())
    once = len(traced)
    traced.clear()
    workbench(lambda *args: losses(*args)[0], *inputs, under=deep).run(ExpandComposites())
    assert len(traced) == once
