"""The hypothesis strategy that draws whole programs, and how to run them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from hypothesis import strategies as st
from programs.border import BORDERS, POSITIONAL
from programs.draft import Draft, Draw
from programs.program import ALL, Case, Setting
from programs.statements import STATEMENTS, WEIGHTS

T = TypeVar("T")

_SHAPES = ((4, 8), (8, 8), (2, 4, 8))
_RARE_SHAPES = ((), (1, 8), (0, 8), (2, 4, 4, 4))
_LOWER = (torch.bfloat16, torch.float16)
_LOWERINGS = ("aot_eager", "eager")
_SCHEDULES = (
    *["once"] * 6,
    "twice",
    "again",
    "together",
    "larger",
    "apart",
    "train",
    "restart",
    "threads",
    *["evaluated"] * 2,
    "rewritten",
)
#: All results, none, one of the first four, or any.
_USED = (ALL, ALL, ALL, 0b0001, 0b0010, 0b0100, 0b1000, 0b0101, 0b0011, 0b1110, 0)
_DTYPES = (*[torch.float32] * 6, torch.bfloat16, torch.float16)
_CHUNKS = (*[""] * 8, "forward", "backward")
_OPTIMIZERS = ("", "compiled", "compiled-lean")
_LOSSES = ("loss_of_layer", "loss_in_block", "loss_checkpointed")
#: Schedules whose errors a loss in chunks does not multiply.
_SHORT = ("once", "again", "together", "apart")


@dataclass(frozen=True)
class Focus:
    """Which programs are drawn: of these ``kinds`` of statements, and up to ``longest`` of them.

    ``settings``: words of :meth:`Setting.words`; where one names a value of a setting, that has no other. All unless
    named.
    """

    kinds: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    longest: int = 30

    def has(self, kind: str) -> bool:
        """Whether statements of that kind are drawn."""
        return kind in (self.kinds or STATEMENTS)

    def options(self, options: Sequence[T]) -> list[T]:
        """Those of ``options`` that are named; all if none is."""
        return [option for option in options if option in self.settings] or list(options)


@st.composite
def cases(draw: Draw, focus: Focus) -> Case:
    """Programs of the given focus."""
    setting, lower = _setting(draw, focus), draw(st.sampled_from(_LOWER))
    kinds = {kind: STATEMENTS[kind] for kind in focus.kinds or STATEMENTS}
    draft = Draft(draw, kinds, WEIGHTS, lower, setting)
    draft.input(draft.pick(_SHAPES))
    if draft.chance():
        draft.input(draft.pick(_SHAPES + _RARE_SHAPES), draft.pick(_DTYPES), draft.chance(5))
    if setting.own:
        draft.first("region")
    if setting.chunks:
        draft.statements_without(_LOSSES, focus.longest, usual=5)
        for _ in range(draft.pick((1, 1, 2))):
            draft.first(draft.pick([loss for loss in _LOSSES if focus.has(loss)]))
    else:
        draft.statements(focus.longest, usual=12)
    case = draft.finish(_results(draft), _border(draft, focus))
    watched = setting.schedule != "rewritten" and bool(draw(st.sampled_from(focus.options(("", "", "watched")))))
    return replace(case, setting=replace(setting, watched=watched))


def _border(draft: Draft, focus: Focus) -> str:
    borders = POSITIONAL if draft.setting.schedule == "rewritten" else tuple(BORDERS)
    return draft.pick(focus.options((*borders[:1] * len(borders), *borders)))


def _setting(draw: Draw, focus: Focus) -> Setting:
    """A program may say by its own regions what is cast, if there are any."""
    schedule = draw(st.sampled_from(focus.options(_SCHEDULES)))
    scaled = schedule != "threads" and bool(draw(st.sampled_from(focus.options(("", "", "", "scaled")))))
    factor = draw(st.sampled_from((1.0, 1.0, 1e6))) if scaled else 1.0
    ambient = ["ambient"] * (2 if schedule == "evaluated" else 1)  # an evaluation follows how the model trained
    speakers = focus.options(("policy", *ambient, *["own"] * focus.has("region")))
    lowering, says = draw(st.sampled_from(focus.options(_LOWERINGS))), draw(st.sampled_from(speakers))
    used = draw(st.sampled_from(_USED))
    own_thread = focus.has("gradient") and schedule != "threads"  # another thread does not see Dynamo's settings
    traced = own_thread and bool(draw(st.sampled_from(focus.options(("", "traced")))))
    setting = Setting(lowering, says == "ambient", schedule, scaled, factor, used, says == "own", traced=traced)
    if schedule == "twice":  # AOTAutograd's graphs have one backward, and a scaler's too
        setting = replace(setting, lowering="eager", scaled=False, factor=1.0)
    if schedule == "rewritten":
        return Setting("eager", schedule=schedule, used=used)
    if schedule == "restart":
        setting = replace(setting, compiled=draw(st.sampled_from(focus.options(_OPTIMIZERS))))
    return _in_chunks(draw, focus, setting) if any(map(focus.has, _LOSSES)) else setting


def _in_chunks(draw: Draw, focus: Focus, setting: Setting) -> Setting:
    """``setting``, or one with a rule that cuts losses into chunks."""
    chunks = draw(st.sampled_from([word for word in _CHUNKS if word or "chunks" not in focus.settings]))
    if not chunks:
        return setting
    schedule = setting.schedule if setting.schedule in _SHORT else "once"
    return replace(
        setting, ambient=False, own=False, schedule=schedule, factor=1.0, used=ALL, chunks=chunks, compiled=""
    )


def _results(draft: Draft) -> list[str]:
    """Up to four values that nothing else reads, and up to two more in sight: inputs, or the same again."""
    names = list(draft.values)[::-1]
    more = (0, 0, 0, 1) if draft.setting.chunks else (0, 1, 2)  # a loss whose logits are returned stays whole
    return [*(draft.unread() or names)[:4], *(draft.pick(names) for _ in range(draft.pick(more)))]
