"""What programs are made of is drawn, each kind and each border, and does what its text says."""

from dataclasses import replace

import pytest
from programs.border import BORDERS
from programs.compare import differences
from programs.program import Setting
from programs.render import build
from programs.search import draw
from programs.statements import STATEMENTS
from programs.strategy import Focus
from programs.test_schedules import NORMED
from support.checks.exhaustive import exhaustive

#: Kinds that need a setting, or another kind.
SETTINGS = {"recurrent": ("eager", "once"), "transform": ("ambient", "once"), "enable_grad": ("once", "policy")}


@pytest.mark.parametrize("kind", exhaustive(STATEMENTS, always=["hook", "gradient", "functional_call", "scanned"]))
def test_each_kind_is_drawn(kind: str) -> None:
    kinds = dict.fromkeys((kind, "linear", "no_grad", "in_shape"))
    focus = Focus(tuple(name for name in kinds if name in STATEMENTS), SETTINGS.get(kind, ("once",)), 12)
    assert any(kind in draw(number, focus).program.kinds() for number in range(40))


def test_each_border_is_drawn() -> None:
    drawn = {draw(number, Focus(("linear",), ("once",), 1)).program.border for number in range(60)}
    assert drawn == set(BORDERS)


@pytest.mark.parametrize("border", BORDERS)
def test_a_border_hands_everything_over(border: str) -> None:
    """In order: the same results as by position, and as under autocast."""
    plain, built = build(NORMED), build(replace(NORMED, border=border))
    assert [*map(str, built.flat(built.module)(*built.inputs))] == [*map(str, plain.module(*plain.inputs))]
    assert differences(replace(NORMED, border=border), Setting()) == []
