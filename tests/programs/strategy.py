"""The hypothesis strategy that draws whole programs, and how to run them."""

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from programs.draft import Draft, Draw
from programs.program import ALL, Case, Setting
from programs.statements import STATEMENTS, WEIGHTS

_SHAPES = ((4, 8), (8, 8), (2, 4, 8))
_LOWER = (torch.bfloat16, torch.float16)
_LOWERINGS = ("aot_eager", "eager")
_SCHEDULES = (*["once"] * 6, "again", "together", "larger", "apart", "train", "restart", "threads", "evaluated")
#: All results, none, one of the first four, or any.
_USED = (ALL, ALL, ALL, 0b0001, 0b0010, 0b0100, 0b1000, 0b0101, 0b0011, 0b1110, 0)
_DTYPES = (*[torch.float32] * 6, torch.bfloat16, torch.float16)


@st.composite
def cases(draw: Draw, kinds: Sequence[str] = (), longest: int = 30) -> Case:
    """Programs of up to ``longest`` statements of the given ``kinds``, all of them unless named."""
    setting, lower = _setting(draw, regions="region" in (kinds or STATEMENTS)), draw(st.sampled_from(_LOWER))
    draft = Draft(draw, {kind: STATEMENTS[kind] for kind in kinds or STATEMENTS}, WEIGHTS, lower, setting)
    draft.input(draft.pick(_SHAPES))
    if draft.chance():
        draft.input(draft.pick(_SHAPES), draft.pick(_DTYPES))
    if setting.own:
        draft.first("region")
    draft.statements(longest, usual=12)
    return draft.finish(_results(draft))


def _setting(draw: Draw, regions: bool) -> Setting:
    """``regions``: whether a program may say by its own regions what is cast."""
    schedule = draw(st.sampled_from(_SCHEDULES))
    scaled = schedule != "threads" and draw(st.sampled_from((False, False, False, True)))
    factor = draw(st.sampled_from((1.0, 1.0, 1e6))) if scaled else 1.0
    speakers = ("policy", "around", "regions") if regions else ("policy", "around")
    lowering, says = draw(st.sampled_from(_LOWERINGS)), draw(st.sampled_from(speakers))
    used = draw(st.sampled_from(_USED))
    return Setting(lowering, says == "around", schedule, scaled, factor, used, says == "regions")


def _results(draft: Draft) -> list[str]:
    """Up to four values that nothing else reads, and up to two more in sight: inputs, or the same again."""
    names = list(draft.values)[::-1]
    return [*(draft.unread() or names)[:4], *(draft.pick(names) for _ in range(draft.pick((0, 1, 2))))]
