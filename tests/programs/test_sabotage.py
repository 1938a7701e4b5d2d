"""The random programs find what is broken on purpose, within the numbers that the suite runs."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from programs.search import Shrink, search

from fxamp.backend import lowering
from fxamp.passes.forward import insert_casts
from fxamp.passes.shared import regions
from fxamp.passes.shared.cast_rules import Edit, edit_for
from fxamp.passes.shared.cast_writer import CastWriter
from fxamp.policy import Category


def remove_a_cast(patch: pytest.MonkeyPatch) -> None:
    """What autocast runs in float32 follows its inputs."""

    def edit(rule: Any, *rest: Any) -> Edit:
        return Edit() if rule.cast is Category.FP32 else edit_for(rule, *rest)

    patch.setattr(insert_casts, "edit_for", edit)


def share_a_cast(patch: pytest.MonkeyPatch) -> None:
    """An activation is cast once for all its uses."""
    patch.setattr(CastWriter, "_shareable", lambda self, source: True)


def scale_a_gradient(patch: pytest.MonkeyPatch) -> None:
    """Backward graphs return their first gradient times 1.001."""
    compile_graph = lowering.Run.compile

    def compile_scaled(self: lowering.Run, gm: Any, inputs: Sequence[Any], backward: bool, compiler: Any) -> Any:
        compiled = compile_graph(self, gm, inputs, backward, compiler)
        return _scaling(compiled) if backward else compiled

    patch.setattr(lowering.Run, "compile", compile_scaled)


def _scaling(compiled: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], Sequence[Any]]:
    def call(inputs: list[Any]) -> Sequence[Any]:
        first, *others = compiled(inputs)
        return [first if first is None else first * 1.001, *others]

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def skip_a_region(patch: pytest.MonkeyPatch) -> None:
    """What a region asks for does not hold."""
    patch.setattr(regions, "_entered", lambda mark, region, context: region)


SABOTAGES = (remove_a_cast, share_a_cast, scale_a_gradient, skip_a_region)


@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_sabotage_is_found(sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch)
    assert any(search([number], shrink=Shrink.NO).failures for number in range(48))
