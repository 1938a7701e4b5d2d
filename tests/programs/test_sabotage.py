"""The random programs find what is broken on purpose, within the numbers that the suite runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from itertools import islice
from typing import Any

import pytest
import torch
from programs.compare import differences
from programs.functions import Function
from programs.program import Declaration, Line, Program, Setting, Text
from programs.search import Shrink, search
from programs.strategy import Focus
from support.checks.exhaustive import exhaustive
from torch._dynamo import functional_export
from torch._dynamo.backends import common
from torch.fx import Interpreter
from torch.optim import Optimizer

from fxamp import capture as capture_bodies
from fxamp.backend import policy_choice
from fxamp.backend.policy_choice import ChosenPolicy
from fxamp.capture import fakes
from fxamp.capture.hidden_gradients import GradientNodes
from fxamp.capture.reads import Reads
from fxamp.graph import AliasSets, aliases, fake_mode_of, higher_order_ops
from fxamp.passes.forward import annotate_rules, expand_composites, insert_casts
from fxamp.passes.shared import autocast_regions, linear_losses
from fxamp.passes.shared.cast_rules import Edit, edit_for
from fxamp.passes.shared.cast_writer import CastWriter
from fxamp.passes.step.pack_state import COUNT
from fxamp.pipeline.layouts import TracedLayouts

capture, aten_trace, wrappers, writer, run, linear_cross_entropy = (
    import_module(f"fxamp.{name}")
    for name in (
        "capture.dynamo_trace", "capture.aten_trace", "graph.tensor_wrappers", "graph.writer", "pipeline.run",
        "kernels.linear_cross_entropy",
    )
)  # fmt: skip


def remove_a_cast(patch: pytest.MonkeyPatch) -> None:
    """The last input of every op that a rule casts stays as it is."""

    def edit(*args: Any) -> Edit:
        whole = edit_for(*args)
        return replace(whole, casts=dict(list(whole.casts.items())[:-1]))

    patch.setattr(insert_casts, "edit_for", edit)


def share_a_cast(patch: pytest.MonkeyPatch) -> None:
    """An activation is cast once for all its uses."""
    patch.setattr(CastWriter, "_shareable", lambda self, source, cached: True)


def merge_placeholders(patch: pytest.MonkeyPatch) -> None:
    """Inputs of a body that have one value are one tensor: the capture takes the one for the other, and says so."""
    refake = fakes._refake
    patch.setattr(fakes, "_refake", lambda value, mode: value if fake_mode_of(value) is mode else refake(value, mode))


def scale_a_gradient(patch: pytest.MonkeyPatch) -> None:
    """AOTAutograd's backward graphs return their first gradient times 1.001."""
    torch._dynamo.list_backends()  # torch's own backends take the original
    backend = common.aot_autograd

    def scaled(*, bw_compiler: Any, **others: Any) -> Any:
        return backend(bw_compiler=lambda gm, inputs: _scaling(bw_compiler(gm, inputs)), **others)

    patch.setattr(common, "aot_autograd", scaled)


def _scaling(compiled: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], Sequence[Any]]:
    def call(inputs: list[Any]) -> Sequence[Any]:
        first, *others = compiled(inputs)
        return [first if first is None else first * 1.001, *others]

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def skip_a_region(patch: pytest.MonkeyPatch) -> None:
    """What a region asks for does not hold."""
    patch.setattr(autocast_regions, "_entered", lambda mark, region, context: region)


def leave_strides(patch: pytest.MonkeyPatch) -> None:
    """What a pass does to strides stays."""
    patch.setattr(TracedLayouts, "restore", lambda *args: 0)


def overlook_regions(patch: pytest.MonkeyPatch) -> None:
    """ "auto" does not see the regions of a graph."""
    patch.setattr(policy_choice, "region_dtypes", lambda gm, device: [])


def share_a_written_cast(patch: pytest.MonkeyPatch) -> None:
    """What a write through a view gave a gradient, and what is computed from it, is cast once for all its uses."""
    patch.setattr(AliasSets, "of", lambda self, nodes: set())


def forget_the_training(patch: pytest.MonkeyPatch) -> None:
    """ "auto" does not know in an evaluation that the model trains under autocast."""
    patch.setattr(policy_choice, "follows_autocast", lambda caller, parameters=(): False)


def hide_data(patch: pytest.MonkeyPatch) -> None:
    """``.data`` is traced as it runs: no op of the graph."""
    patch.setattr(wrappers, "is_data", lambda node: False)
    patch.setattr(aten_trace._AtenTrace, "_traced", lambda self, node: Interpreter.run_node(self, node))


def lose_sizes(patch: pytest.MonkeyPatch) -> None:
    """A size that depends on values has a new name for everyone who traces it."""
    patch.setattr(aten_trace, "rebind_sizes", lambda *args: None)
    patch.setattr(writer, "rebind_sizes", lambda *args: None)
    patch.setattr(run, "dropped_sizes", lambda *args: nullcontext())


def keep_questions(patch: pytest.MonkeyPatch) -> None:
    """What asks for a number stays in a decomposition: whether cuDNN takes a tensor."""
    patch.setattr(expand_composites, "is_answered", lambda node: False)


def require_results(patch: pytest.MonkeyPatch) -> None:
    """A graph without results cannot be captured."""
    patch.setattr(capture, "returning_nothing", nullcontext)


def require_inputs(patch: pytest.MonkeyPatch) -> None:
    """A graph that reads the module's tensors alone cannot be rewritten."""
    torch_writes = functional_export._DynamoBytecodeCodeGen.gen_fn_def
    capturing = capture.returning_nothing

    @contextmanager
    def capturing_inputs() -> Iterator[None]:
        with capturing():
            functional_export._DynamoBytecodeCodeGen.gen_fn_def = torch_writes  # type: ignore[method-assign]
            yield

    patch.setattr(capture, "returning_nothing", capturing_inputs)


def lose_gradient_modes(patch: pytest.MonkeyPatch) -> None:
    """A loss in chunks has gradients for a layer that stands where they are off."""
    patch.setattr(linear_losses, "nodes_with_gradients", lambda graph: set(graph.nodes))


def drop_a_gradient(patch: pytest.MonkeyPatch) -> None:
    """A loss in chunks treats probabilities as constants."""
    patch.setattr(linear_cross_entropy, "_whole", lambda *args: linear_cross_entropy._Losses.apply(*args))


def round_doubles(patch: pytest.MonkeyPatch) -> None:
    """A loss in chunks is computed in float32, whatever converts its logits."""
    patch.setattr(linear_losses, "keeps_values", lambda node: True)
    patch.setattr(linear_losses, "_COMPUTED", (*linear_losses._COMPUTED, torch.float64))


def forget_the_steps(patch: pytest.MonkeyPatch) -> None:
    """A restart begins to count the steps that key random bits at zero."""
    save = Optimizer.state_dict

    def without(optimizer: Optimizer) -> dict[str, Any]:
        state = save(optimizer)
        for entry in state["state"].values():
            entry.pop(COUNT, None)
        return state

    patch.setattr(Optimizer, "state_dict", without)


def hook_a_cast(patch: pytest.MonkeyPatch) -> None:
    """A hook on a gradient is on a cast of its value, in the dtype that it was captured in."""
    for module in (aliases, annotate_rules, capture_bodies, higher_order_ops, insert_casts, aten_trace):
        patch.setattr(module, "gradient_hook", lambda node: None)


def lose_functions(patch: pytest.MonkeyPatch) -> None:
    """A call that Dynamo leaves whole is traced even if it has a different gradient than its ops."""
    patch.setattr(GradientNodes, "require_derived", lambda self, result: None)


SABOTAGES = (remove_a_cast, scale_a_gradient, skip_a_region, overlook_regions, merge_placeholders)


@pytest.mark.parametrize("sabotage", exhaustive(SABOTAGES, always=[]))
def test_sabotage_is_found(sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch)
    assert any(search([number], shrink=Shrink.NO).failures for number in range(100, 200))


#: Faults of few programs, and the focus that finds each.
FOCUSED = {
    share_a_cast: Focus(("two_layers", "pointwise", "linear"), longest=6),
    share_a_written_cast: Focus(("layers_of_parts", "pointwise", "linear"), ("eager", "once"), 6),
    forget_the_training: Focus(("linear", "pointwise", "product"), ("evaluated", "ambient"), 6),
    hide_data: Focus(("linear", "data_read", "data_write")),
    lose_sizes: Focus(("linear", "masked", "pointwise")),
    keep_questions: Focus(("recurrent", "linear"), ("once", "eager"), 3),
    require_results: Focus(("view",), ("rewritten",), 1),
    require_inputs: Focus(("data_buffer",), ("rewritten",), 1),
    lose_gradient_modes: Focus(("linear", "pointwise", "no_grad", "loss_in_block"), ("chunks",), 3),
    drop_a_gradient: Focus(("linear", "pointwise", "loss_of_layer"), ("chunks",), 3),
    round_doubles: Focus(("linear", "pointwise", "loss_of_layer"), ("chunks",), 3),
    forget_the_steps: Focus(("linear", "pointwise"), ("restart", "compiled-lean"), 4),
    lose_functions: Focus(("function_left_whole", "pointwise", "linear"), ("ambient", "once"), 4),
    hook_a_cast: Focus(("linear", "pointwise", "hook"), ("policy", "once"), 6),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("sabotage", FOCUSED)
def test_a_focus_finds_what_few_programs_hold(
    sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    wrong = list(islice((n for n in range(60) if search([n], FOCUSED[sabotage], Shrink.NO).failures), 1))
    monkeypatch.undo()
    assert wrong and not search(wrong, FOCUSED[sabotage], Shrink.NO).failures


#: An activation that two products read.
SHARED = Program(
    torch.bfloat16,
    (
        Declaration("x0", "input", (4, 8), grad=True),
        Declaration("w0", "parameter", (8, 8), grad=True),
        Declaration("w1", "parameter", (8, 8), grad=True),
    ),
    (
        Line("pointwise", Text("h0 = x0 * 1.7")),
        Line("linear", Text("h1 = F.linear(h0, self.w0)")),
        Line("linear", Text("h2 = F.linear(h0, self.w1)")),
    ),
    ("h1", "h2"),
)


def test_a_shared_cast_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a program of its own: random ones hold it too seldom."""
    assert differences(SHARED, Setting()) == []
    share_a_cast(monkeypatch)
    assert any("the gradient of x0 differs" in one for one in differences(SHARED, Setting()))


def test_placeholders_that_are_one_tensor_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a Function that saves its result: Dynamo gives that and the incoming gradient one value."""
    gradients = ("g * y",)
    function = Function("Unary0", ("a",), False, ("y = a * 3",), ("y",), ("y",), (), (), gradients)
    line = Line("function", Text("h0 = Unary0.apply(F.linear(x0, self.w0))"))
    program = replace(SHARED, statements=(line,), results=("h0",), definitions=(("Unary0", function.source()),))
    assert differences(program, Setting()) == []
    merge_placeholders(monkeypatch)
    assert any("raised" in one and "CaptureError" in one for one in differences(program, Setting()))
    monkeypatch.setattr(Reads, "require", lambda self, node, source: None)
    monkeypatch.setattr(Reads, "require_own", lambda self: None)
    assert any("the gradient of x0 differs" in one for one in differences(program, Setting()))


def test_an_autocast_kernel_that_is_not_asked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a product of the program's own library, which autocast lowers."""
    product = Line("custom_op", Text("h0 = torch.ops.programs.low(x0, self.w0)"))
    lines = (product, Line("linear", Text("h1 = F.linear(h0, self.w1)")))
    program = replace(SHARED, statements=lines, results=("h0", "h1"))
    assert differences(program, Setting()) == []
    monkeypatch.setattr(annotate_rules, "kernel_dtypes", lambda *_: {})
    assert any("result 0 differs" in one for one in differences(program, Setting()))


def test_a_forgotten_training_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same program, evaluated outside of autocast after its backward; "auto" would cast on such a device."""
    setting = Setting(ambient=True, schedule="evaluated")
    monkeypatch.setattr(policy_choice, "native_bfloat16", lambda *args: True)
    monkeypatch.setattr(ChosenPolicy, "settled", lambda choice, *args: choice)
    assert differences(SHARED, setting) == []
    forget_the_training(monkeypatch)
    assert any("result 2 differs" in one for one in differences(SHARED, setting))


#: Statements whose gradients are expanded, and such as read them through views or in kernels.
EXPANDED = Focus(("partial_sum", "summed_product", "viewed_linear", "group_norm", "linear"))


@pytest.mark.exhaustive
def test_strides_that_a_pass_leaves_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program in a hundred is found: it must leave a result unused; this one is."""
    leave_strides(monkeypatch)
    assert search([173], EXPANDED, Shrink.NO).failures
    monkeypatch.undo()
    assert not search([173], EXPANDED, Shrink.NO).failures
