"""Every order of passes, first to last. What a pass needs of those before it, it states in ``requires``."""

from fxamp.passes.backward.cast_backward import CastBackward
from fxamp.passes.backward.scale_backward import ScaleBackward
from fxamp.passes.base import CastContext, Context, PassSequence
from fxamp.passes.forward.annotate_rules import AnnotateRules
from fxamp.passes.forward.drop_regions import DropRegions
from fxamp.passes.forward.expand_composites import ExpandComposites
from fxamp.passes.forward.fit_constants import FitConstants
from fxamp.passes.forward.fold_casts import FoldCasts
from fxamp.passes.forward.insert_casts import InsertCasts
from fxamp.passes.forward.restore_outputs import RestoreOutputs
from fxamp.passes.forward.scale_products import ScaleProducts
from fxamp.passes.partition.mark_recomputed import MarkRecomputed
from fxamp.passes.partition.pack_kept import PackKept
from fxamp.passes.partition.unpack_kept import UnpackKept
from fxamp.passes.step.drop_copies import DropCopies
from fxamp.passes.step.fold_unscale import FoldUnscale
from fxamp.passes.step.guard_updates import GuardUpdates
from fxamp.passes.step.lift_scalars import LiftScalars
from fxamp.passes.step.realize_scalars import RealizeScalars
from fxamp.passes.step.share_equal import ShareEqual
from fxamp.passes.step.spread_fills import SpreadFills

#: Over the captured graph.
FORWARD: PassSequence[CastContext] = PassSequence(
    "forward",
    (
        ExpandComposites(),
        AnnotateRules(),
        InsertCasts(),
        FitConstants(),
        RestoreOutputs(),
        FoldCasts(),
        ScaleProducts(),
        DropRegions(),
    ),
)


def joint(results: int) -> PassSequence[CastContext]:
    """Over a joint graph of forward and backward, of whose outputs the first ``results`` are the forward's."""
    return PassSequence("joint", (MarkRecomputed(results),))


def kept_forward(results: int) -> PassSequence[CastContext]:
    """Over a partitioned forward, of whose outputs the first ``results`` are its results."""
    return PassSequence("kept-forward", (PackKept(results),))


def kept_backward(unpack: UnpackKept) -> PassSequence[CastContext]:
    """Over the backward of the same partition."""
    return PassSequence("kept-backward", (unpack,))


def backward(*, rules: bool, scale: ScaleBackward | None) -> PassSequence[CastContext]:
    """Over AOTAutograd's backward graph: ``rules`` if the policy has some for it, ``scale`` if the loss is scaled."""
    return PassSequence(
        "backward",
        (
            *([CastBackward()] if rules else []),
            *([scale] if scale else []),
        ),
    )


def step(
    *, lifted: bool, scaled: bool, clipped: bool, guarded: bool, for_inductor: bool, flat: bool = False
) -> PassSequence[Context]:
    """Over an optimizer's step.

    ``flat``: of one parameter, whose size is not to be named. ``lifted``: its floats become one tensor. ``scaled``:
    gradients hold the scale. ``clipped``: a clip coefficient is given. ``guarded``: a flag decides. ``for_inductor``:
    Inductor compiles it.
    """
    return PassSequence(
        "step",
        (
            DropCopies(),
            *([SpreadFills()] if flat else []),
            *([LiftScalars()] if lifted else []),
            ShareEqual(),
            *([FoldUnscale(scaled, clipped)] if scaled or clipped else []),
            *([GuardUpdates()] if guarded else []),
            *([RealizeScalars()] if for_inductor else []),
        ),
    )
