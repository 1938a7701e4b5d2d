"""Pointwise ops, reductions, views and results of several parts."""

from programs.draft import Draft
from programs.statements.registry import statement

_UNARY = (
    "{}.relu()", "{} * 2", "{} + 1", "-{}", "{}.sigmoid()", "{}.tanh()", "F.gelu({})", "F.silu({})", "{}.exp()",
    "{}.clone()", "{}.abs()", "{}.square()", "F.softplus({})", "F.elu({})", "{}.clamp(-0.5, 0.5)", "F.hardtanh({})",
    "torch.erf({})", "{}.contiguous()", "F.dropout({}, 0.5, training=False)", "torch.nan_to_num({})",
    "F.leaky_relu({})", "F.glu({})", "{}.flip(0)", "{}.roll(1, -1)", "F.normalize({}, dim=-1)",
)  # fmt: skip


@statement(weight=4)
def pointwise(d: Draft) -> None:
    d.let(d.pick(_UNARY).format(d.value(lambda v: v.dim() >= 1)))


_BINARY = (
    "{} + {}", "{} * {}", "{} - {}", "{} / ({}.abs() + 1)", "torch.maximum({}, {})", "torch.where({0} > 0, {0}, {1})",
    "torch.lerp({}, {}, 0.5)", "torch.addcmul({0}, {0}, {1})", "torch.atan2({}, {})", "torch.hypot({}, {})",
)  # fmt: skip


@statement(weight=4)
def binary(d: Draft) -> None:
    a = d.value()
    b = d.alike(a)
    d.let(d.pick(_BINARY).format(a, b))


@statement()
def with_parameter(d: Draft) -> None:
    """A parameter that autocast does not cast."""
    x = d.value(lambda v: v.dim() >= 1)
    d.let(d.pick(("{} * {}", "{} + {}")).format(x, d.parameter(d.shape(x)[-1])))


_REDUCTIONS = (
    "{}.sum(-1)", "{}.mean(0)", "{}.sum()", "{}.softmax(-1)", "{}.log_softmax(-1)", "{}.cumsum(0)", "{}.amax(-1)",
    "{}.prod(-1)", "{}.norm(dim=-1)", "{}.mean(-1, keepdim=True)", "{}.logsumexp(0)", "{}.var(-1)", "{}.std(0)",
    "{}.cumprod(-1)", "torch.linalg.vector_norm({})", "{}.sum(0, dtype=torch.float32)", "{}.median()",
    "{}.logcumsumexp(-1)", "torch.dist({0}, {0} * 2)", "{}.trace()", "torch.quantile({}, 0.5)",
)  # fmt: skip


@statement(weight=2)
def reduction(d: Draft) -> None:
    x = d.value(lambda v: v.dim() >= 1)
    d.let(d.pick(_REDUCTIONS).replace("{0}", "{}").replace("{}", x))


_VIEWS = (
    "{}[0]", "{}[1:]", "{}[..., :4]", "{}.t()", "{}.view(-1)", "{}.unsqueeze(0)", "{}[None, 0]", "{}.transpose(0, -1)",
    "{}.reshape(-1, 4)", "{}.flatten()", "{}.squeeze()", "{}.diagonal()", "{}.expand(2, *{}.shape)",
    "{}.movedim(0, -1)", "{}.T", "{}.mT", "{}.H", "{}.unflatten(-1, (2, -1))", "{}.narrow(0, 0, 1)", "{}[::2]",
    "{}.view_as({})", "{}.as_strided((2, 2), (2, 1))",
)  # fmt: skip


@statement(weight=2)
def view(d: Draft) -> None:
    x = d.value(lambda v: v.dim() >= 1)
    d.let(d.pick(_VIEWS).replace("{}", x))


_PARTS = (
    ("{}.chunk(2, -1)", 2), ("{}.max(-1)", 2), ("{}.sort(-1)", 2), ("{}.topk(2, -1)", 2), ("{}.split(4, -1)", 2),
    ("torch.var_mean({}, -1)", 2), ("{}.unbind(0)", 4), ("torch.tensor_split({}, 2)", 2), ("torch.frexp({})", 2),
)  # fmt: skip


@statement()
def parts(d: Draft) -> None:
    code, count = d.pick(_PARTS)
    d.let_several(code.format(d.value(lambda v: v.dim() >= 1)), count)


_PAIRED = (
    "torch.broadcast_tensors({}[:1], {}[None])", "torch.meshgrid({}.flatten()[:3], {}.flatten()[:2], indexing='ij')",
    "torch.atleast_3d({}, {})",
)  # fmt: skip


@statement()
def paired_views(d: Draft) -> None:
    """Two results of one call, each a view of its own input."""
    x = d.ranked(2, 3)
    product = d.let(f"{d.lowered(x)} @ {d.weight(d.shape(x)[-1], 4)}")
    d.let_several(d.pick(_PAIRED).format(product, d.alike(product)), 2)


_JOINED = (
    "torch.cat([{}, {}])", "torch.stack([{}, {}], -1)", "torch.hstack([{}, {}])", "torch.cat([{0}, {0}, {1}], -1)",
)  # fmt: skip


@statement(weight=2)
def joined(d: Draft) -> None:
    x = d.value(lambda v: v.dim() >= 1)
    d.let(d.pick(_JOINED).format(x, d.alike(x)))
