"""The hypothesis strategy that draws whole programs, and how to run them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from programs.draft import Draft
from programs.program import Case, Setting
from programs.statements import STATEMENTS, WEIGHTS

_SHAPES = ((4, 8), (8, 8), (2, 4, 8))
_LOWER = (torch.bfloat16, torch.float16)
_SETTINGS = tuple(Setting(lowering, ambient) for lowering in ("aot_eager", "eager") for ambient in (False, True))
_DTYPES = (*[torch.float32] * 6, torch.bfloat16, torch.float16)


@st.composite
def cases(draw: Callable[[st.SearchStrategy[Any]], Any], kinds: Sequence[str] = (), longest: int = 30) -> Case:
    """Programs of up to ``longest`` statements of the given ``kinds``, all of them unless named."""
    setting, lower = draw(st.sampled_from(_SETTINGS)), draw(st.sampled_from(_LOWER))
    draft = Draft(draw, {kind: STATEMENTS[kind] for kind in kinds or STATEMENTS}, WEIGHTS, lower, setting)
    draft.input(draft.pick(_SHAPES))
    if draft.chance():
        draft.input(draft.pick(_SHAPES), draft.pick(_DTYPES))
    draft.statements(longest, usual=12)
    return draft.finish(_results(draft))


def _results(draft: Draft) -> list[str]:
    """Up to four values that nothing else reads, and up to two more in sight: inputs, or the same again."""
    names = list(draft.values)[::-1]
    return [*(draft.unread() or names)[:4], *(draft.pick(names) for _ in range(draft.pick((0, 1, 2))))]
