"""The order of all passes. Each pass states in ``requires`` what it needs from earlier passes."""

from typing import Protocol

from fxamp.passes.backward.realize_casts import RealizeCasts
from fxamp.passes.backward.realize_gradients import RealizeGradients
from fxamp.passes.backward.realize_sums import RealizeSums
from fxamp.passes.base import CastContext, Context, Pass
from fxamp.passes.forward.annotate_rules import AnnotateRules
from fxamp.passes.forward.chunk_losses import ChunkLosses
from fxamp.passes.forward.drop_regions import DropRegions
from fxamp.passes.forward.drop_results import DropResults
from fxamp.passes.forward.expand_composites import ExpandComposites
from fxamp.passes.forward.fit_constants import FitConstants
from fxamp.passes.forward.fold_casts import FoldCasts
from fxamp.passes.forward.insert_casts import InsertCasts
from fxamp.passes.forward.keep_autocast import KeepAutocast
from fxamp.passes.forward.restore_outputs import RestoreOutputs
from fxamp.passes.forward.scale_linear_losses import ScaleLinearLosses
from fxamp.passes.forward.scale_products import ScaleProducts
from fxamp.passes.forward.simplify_masks import SimplifyMasks
from fxamp.passes.partition.add_in_place import AddInPlace
from fxamp.passes.partition.overlap_copies import OverlapCopies
from fxamp.passes.step.drop_copies import DropCopies
from fxamp.passes.step.fold_unscale import FoldUnscale
from fxamp.passes.step.guard_updates import GuardUpdates
from fxamp.passes.step.lift_scalars import LiftScalars
from fxamp.passes.step.pack_state import PackState
from fxamp.passes.step.realize_roundings import RealizeRoundings
from fxamp.passes.step.realize_scalars import RealizeScalars
from fxamp.passes.step.share_equal import ShareEqual
from fxamp.passes.step.spread_fills import SpreadFills

#: For the captured graph.
FORWARD: tuple[Pass[CastContext], ...] = (
    DropResults(),
    SimplifyMasks(),
    ExpandComposites(),
    AnnotateRules(),
    InsertCasts(),
    FitConstants(),
    RestoreOutputs(),
    FoldCasts(),
    ChunkLosses(),
    ScaleLinearLosses(),
    ScaleProducts(),
    KeepAutocast(),
    DropRegions(),
)

#: For AOTAutograd's forward, after the passes of the participants.
PARTITIONED_FORWARD: tuple[Pass[CastContext], ...] = (AddInPlace(), OverlapCopies())

#: For AOTAutograd's backward, after the passes of the participants (fxamp/backend/participants.py), in this order:
#: drop-unused-results, cast-backward, scale-backward. Around the partition: mark-overwritten on the joint graph; with
#: keep rules mark-recomputed on it, then pack-kept on the forward, then unpack-kept on the backward.
BACKWARD: tuple[Pass[CastContext], ...] = (
    RealizeCasts(),
    RealizeSums(),
    RealizeGradients(),
    AddInPlace(),
    OverlapCopies(),
)


class StepFlags(Protocol):
    """What a graph does besides the step; :class:`fxamp.optim.StepOptions` has these."""

    @property
    def scaled(self) -> bool: ...
    @property
    def clipped(self) -> bool: ...
    @property
    def guarded(self) -> bool: ...


def step(
    flags: StepFlags, *, lifted: bool, for_inductor: bool, flat: bool = False, packed: PackState | None = None
) -> tuple[Pass[Context], ...]:
    """Return the passes for an optimizer's step.

    ``flat``: the step of one parameter; the graph must not name its size. ``packed``: how its state is stored.
    ``lifted``: its floats become one tensor. ``for_inductor``: Inductor compiles it.
    """
    return (
        DropCopies(),
        *([SpreadFills()] if flat else []),
        *([LiftScalars()] if lifted else []),
        ShareEqual(),
        *([FoldUnscale(flags.scaled, flags.clipped)] if flags.scaled or flags.clipped else []),
        *([packed] if packed else []),
        *([GuardUpdates()] if flags.guarded else []),
        *([RealizeRoundings(), RealizeScalars()] if for_inductor else []),
    )
