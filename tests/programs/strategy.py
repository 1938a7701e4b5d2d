"""The hypothesis strategy that draws whole programs, and how to run them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from programs.draft import Draft, Unfit
from programs.program import Case, Setting
from programs.statements import STATEMENTS

_SHAPES = ((4, 8), (8, 8), (2, 4, 8))
_LOWER = (torch.bfloat16, torch.float16)
_SETTINGS = tuple(Setting(lowering, ambient) for lowering in ("aot_eager", "eager") for ambient in (False, True))


@st.composite
def cases(draw: Callable[[st.SearchStrategy[Any]], Any], kinds: Sequence[str] = (), longest: int = 10) -> Case:
    """Programs of up to ``longest`` statements of the given ``kinds``, all of them unless named."""
    setting = draw(st.sampled_from(_SETTINGS))
    draft = Draft(draw, draw(st.sampled_from(_LOWER)))
    with torch.autocast("cpu", draft.lower):
        draft.input(draft.pick(_SHAPES))
        for _ in range(draw(st.integers(1, longest))):
            _draw_statement(draft, kinds or tuple(STATEMENTS))
    return Case(draft.finish(_results(draft)), setting)


def _draw_statement(draft: Draft, kinds: Sequence[str]) -> None:
    """One statement, or none where what was drawn does not fit."""
    if len(draft.values) < 3 and draft.pick((False, False, True)):
        draft.input(draft.pick(_SHAPES))
    draft.kind = draft.pick(kinds)
    try:
        STATEMENTS[draft.kind](draft)
    except Unfit:
        return


def _results(draft: Draft) -> list[str]:
    """The latest value, and up to two more in sight, which may be inputs or the same again."""
    names = list(draft.values)[::-1]
    return [names[0], *(draft.pick(names) for _ in range(draft.pick((0, 1, 2))))]
