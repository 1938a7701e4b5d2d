"""Norms, losses and pooling."""

from programs.draft import Draft, Unfit
from programs.statements.registry import statement


@statement(weight=2)
def layer_norm(d: Draft) -> None:
    x = d.value(lambda v: v.dim() >= 2)
    size = d.shape(x)[-1]
    affine = f", {d.parameter(size)}, {d.parameter(size)}" if d.chance() else ""
    d.let(f"F.layer_norm({x}, ({size},){affine})")


@statement()
def rms_norm(d: Draft) -> None:
    x = d.value(lambda v: v.dim() >= 2)
    size = d.shape(x)[-1]
    weight = f", {d.parameter(size)}" if d.chance() else ""
    d.let(f"F.rms_norm({x}, ({size},){weight})")


@statement()
def group_norm(d: Draft) -> None:
    x = d.value(lambda v: v.dim() >= 2)
    size = d.shape(x)[1]
    affine = f", {d.parameter(size)}, {d.parameter(size)}" if d.chance() else ""
    d.let(f"F.group_norm({x}, 2{affine})")


@statement()
def batch_norm(d: Draft) -> None:
    """Running statistics are buffers that the call writes to."""
    if d.place.body:
        raise Unfit
    x = d.value(lambda v: v.dim() in (2, 3))
    size = d.shape(x)[1]
    mean, var = d.buffer(size), d.buffer(size)
    if mean == var:
        raise Unfit
    affine = f"weight={d.parameter(size)}, bias={d.parameter(size)}, " if d.chance() else ""
    d.let(f"F.batch_norm({x}, {mean}, {var}, {affine}training={d.pick((True, False))})")


#: torch's fake kernel of huber_loss promotes two dtypes, and its real one does not.
_LOSSES = (
    "F.mse_loss({}, {})", "F.l1_loss({}, {})", "F.smooth_l1_loss({}, {})", "F.huber_loss({0}, {1}.type_as({0}))",
    "F.cross_entropy({}, {}.softmax(-1))", "F.binary_cross_entropy_with_logits({}, {}.sigmoid())",
    "F.kl_div({}.log_softmax(-1), {}.softmax(-1), reduction='batchmean')", "F.soft_margin_loss({}, {}.sign())",
    "F.cosine_similarity({}, {}, dim=-1)", "F.binary_cross_entropy({}.sigmoid(), {}.sigmoid())",
    "F.poisson_nll_loss({}, {})", "F.mse_loss({}, {}, reduction='none')", "F.gaussian_nll_loss({0}, {1}, {1}.exp())",
    "F.pairwise_distance({}, {})", "F.hinge_embedding_loss({}, {}.sign())", "torch.cdist({}, {})",
)  # fmt: skip


@statement(weight=2)
def loss(d: Draft) -> None:
    x = d.value(lambda v: v.dim() >= 1)
    d.let(d.pick(_LOSSES).format(x, d.alike(x)))


@statement()
def loss_of_classes(d: Draft) -> None:
    x = d.ranked(2)
    labels = f"torch.arange({d.shape(x)[0]}) % {d.shape(x)[1]}"
    d.let(d.pick(("F.cross_entropy({}, {})", "F.nll_loss({}.log_softmax(-1), {})")).format(x, labels))


_POOLS = (
    "F.max_pool1d({}, 2)", "F.avg_pool1d({}, 2)", "F.adaptive_avg_pool1d({}, 2)", "F.interpolate({}, scale_factor=2)",
    "F.pad({}, (1, 1))", "F.pad({}, (1, 1), mode='reflect')", "F.interpolate({}, size=3)",
    "F.adaptive_max_pool1d({}, 2)", "F.unfold({}[None], 2).squeeze(0)", "F.instance_norm({})",
)  # fmt: skip


@statement()
def pool(d: Draft) -> None:
    d.let(d.pick(_POOLS).format(d.ranked(3)))
