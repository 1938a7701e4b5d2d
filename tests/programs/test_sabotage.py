"""The random programs find what is broken on purpose, within the numbers that the suite runs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from exhaustive import exhaustive
from programs.compare import differences
from programs.program import Declaration, Line, Program, Setting, Text
from programs.search import Shrink, search
from programs.strategy import Focus
from torch._dynamo.backends import common

from fxamp.backend import policy_choice
from fxamp.backend.policy_choice import Choice
from fxamp.passes.forward import insert_casts
from fxamp.passes.shared import autocast_regions
from fxamp.passes.shared.cast_rules import Edit, edit_for
from fxamp.passes.shared.cast_writer import CastWriter
from fxamp.pipeline.layouts import TracedLayouts


def remove_a_cast(patch: pytest.MonkeyPatch) -> None:
    """The last input of every op that a rule casts stays as it is."""

    def edit(*given: Any) -> Edit:
        whole = edit_for(*given)
        return replace(whole, casts=dict(list(whole.casts.items())[:-1]))

    patch.setattr(insert_casts, "edit_for", edit)


def share_a_cast(patch: pytest.MonkeyPatch) -> None:
    """An activation is cast once for all its uses."""
    patch.setattr(CastWriter, "_shareable", lambda self, source: True)


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
    patch.setattr(TracedLayouts, "restore", lambda *given: 0)


def overlook_regions(patch: pytest.MonkeyPatch) -> None:
    """ "auto" does not see the regions of a graph."""
    patch.setattr(policy_choice, "region_dtypes", lambda gm, device: [])


def forget_the_training(patch: pytest.MonkeyPatch) -> None:
    """ "auto" does not know in an evaluation that the model trains under autocast."""
    patch.setattr(policy_choice, "follows_autocast", lambda caller, parameters=(): False)


SABOTAGES = (remove_a_cast, scale_a_gradient, skip_a_region, overlook_regions)


@pytest.mark.parametrize("sabotage", exhaustive(SABOTAGES, always=[remove_a_cast]))
def test_sabotage_is_found(sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch)
    assert any(search([number], shrink=Shrink.NO).failures for number in range(100, 148))


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


def test_a_forgotten_training_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same program, evaluated outside of autocast after its backward; "auto" would cast on such a device."""
    setting = Setting(ambient=True, schedule="evaluated")
    monkeypatch.setattr(policy_choice, "native_bfloat16", lambda *given: True)
    monkeypatch.setattr(Choice, "settled", lambda choice, *given: choice)
    assert differences(SHARED, setting) == []
    forget_the_training(monkeypatch)
    assert any("result 2 differs" in one for one in differences(SHARED, setting))


#: Statements whose gradients are expanded, and such as read them through views or in kernels.
EXPANDED = Focus(("partial_sum", "summed_product", "viewed_linear", "group_norm", "linear"))


def test_strides_that_a_pass_leaves_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program in a hundred is found: it must leave a result unused; this one is."""
    leave_strides(monkeypatch)
    assert search([173], EXPANDED, Shrink.NO).failures
    monkeypatch.undo()
    assert not search([173], EXPANDED, Shrink.NO).failures
