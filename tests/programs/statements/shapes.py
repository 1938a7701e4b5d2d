"""Sums over some dimensions, and expansion: their gradients are expanded and summed."""

from programs.draft import Draft
from programs.statements.registry import statement

_SUMS = (
    "{}.sum(1)", "{}.sum((0, -1))", "{}.mean((0, 1))", "{}.sum(0, keepdim=True)", "{}.sum_to_size(1, *{}.shape[1:])",
    "torch.einsum('bti->bi', {})", "{}.mean(1)", "{}.flatten(1).sum(1)",
)  # fmt: skip


@statement(weight=2)
def partial_sum(d: Draft) -> None:
    d.let(d.pick(_SUMS).replace("{}", d.value(lambda v: v.dim() >= 2)))


_EXPANDED = (
    "{}[:, None].expand(-1, 3, *{}.shape[1:])", "{}.sum(-1, keepdim=True).expand_as({})",
    "{}[..., None].expand(*{}.shape, 2)",
    "{}[:1].expand_as({})", "torch.broadcast_to({}[0], {}.shape)", "{}.mean(-1, keepdim=True).expand_as({}) * {}",
    "{}[:1].expand(2, *{}.shape[1:]).reshape(-1, {}.shape[-1])",
)  # fmt: skip


@statement(weight=2)
def expanded(d: Draft) -> None:
    d.let(d.pick(_EXPANDED).replace("{}", d.value(lambda v: v.dim() >= 2)))


_SUMMED = ("torch.einsum('bti,ij->bj', {}, {})", "torch.einsum('bti,ij->tj', {}, {})")


@statement()
def summed_product(d: Draft) -> None:
    """A product whose gradient is expanded. ``einsum`` adds before it casts: the oracle cannot mark its operands.

    Over a dimension of one element ``einsum`` multiplies elementwise; what it adds in 16 bits is rounded, in a graph
    not.
    """
    x = d.ranked(3)
    sizes = d.shape(x)[-1], d.pick((8, 4))
    if d.chance() or d.place.body or d.place.region or sizes[0] == 1:
        d.let(f"({d.lowered(x)} @ {d.weight(*sizes)}).sum(1)")
    else:
        d.let(d.pick(_SUMMED).format(x, d.parameter(*sizes)))


@statement(weight=2)
def viewed_linear(d: Draft) -> None:
    """A linear layer over a view, whose gradient is read through one."""
    x = d.ranked(3)
    view = d.pick(("{}.transpose(0, 1)", "{}.flatten(0, 1)", "{}[1:]", "{}.expand(2, *{}.shape)", "{}[..., ::2]"))
    operand = d.let(view.replace("{}", x))
    d.let(f"F.linear({d.lowered(operand)}, {d.weight(d.pick((8, 4)), d.shape(operand)[-1])})")
