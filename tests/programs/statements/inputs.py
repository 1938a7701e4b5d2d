"""Inputs of integers and truth values, and what programs do with them."""

import torch
from programs.draft import Draft, Unfit
from programs.statements.registry import statement

_INDEXED = (
    "{x}[{i}]", "{x}.index_select(0, {i})", "{x}[:, {i}]", "{x}[{i}, {i}]", "{x}[..., {i}]", "{x}[{i}][:, None]",
    "{x} * {i}.sum()", "{x} + {i}[0]", "{x} / ({i}.sum() + 1)", "F.one_hot({i}, 4).to({x}) * {x}.mean()",
    "{x}.index_add(0, {i}, {x}[{i}])", "{x} * ({i}.float().mean() + 1)", "{x}[{i}.argsort()]", "{x} ** {i}[0]",
    "{x}[{i}].cumsum(0)",
    "torch.stack([{x}[{i}[0]], {x}[{i}[1]]])", "torch.bucketize({x}.detach(), {i}.float().cumsum(0)) * {x}",
)  # fmt: skip


@statement()
def input_of_integers(d: Draft) -> None:
    x = d.value(lambda v: v.dim() >= 2 and min(v.shape) >= 2)
    i = d.input((2,), d.pick((torch.int64, torch.int64, torch.int32)))
    d.let(d.pick(_INDEXED).format(x=x, i=i))


@statement()
def looked_up(d: Draft) -> None:
    """An embedding of tokens that come from outside, or a bag of them; perhaps the head has the same weight."""
    tokens, table = d.input((2, 4), torch.int64), d.parameter(8, d.pick((8, 4)))
    x = d.let(d.pick(("F.embedding({}, {})", "F.embedding({}, {}, padding_idx=0)", "{1}[{0}]")).format(tokens, table))
    if d.chance():
        d.let(f"F.linear({d.lowered(x)}, {d.lowered(table)})")


@statement()
def bag(d: Draft) -> None:
    tokens, table = d.input((2, 4), torch.int64), d.parameter(8, d.pick((8, 4)))
    d.let(f"F.embedding_bag({tokens}, {table}, mode={d.pick(('mean', 'sum', 'max'))!r})")


_MASKED = (
    "torch.where({m}, {x}, {x} * 2)", "{x}.masked_fill({m}, 0.5)", "{x} * {m}", "torch.where({m}, 0.0, {x})",
    "{x}.masked_fill(~{m}, float('-inf')).softmax(-1)", "{x} + {m}.to({x})", "{x} * ({m} & {m}.flip(0))",
    "{x} * {m}.any(-1, keepdim=True)", "torch.where({m}.logical_not(), {x}, -{x})", "{x} - {m}.sum()",
    "{x} * {m}.float().mean(-1, keepdim=True)",
)  # fmt: skip


@statement()
def input_of_truths(d: Draft) -> None:
    if d.setting.schedule == "larger":
        raise Unfit
    x = d.value(lambda v: v.dim() >= 1)
    d.let(d.pick(_MASKED).format(x=x, m=d.input(d.shape(x), torch.bool)))


_NUMBERS = (
    "{x} * {n}", "{x} + {n}", "torch.where({x} > 0, {x}, {n})", "{x}.clamp(max={n})", "{x} / ({n}.abs() + 1)",
    "torch.lerp({x}, {x} * 2, {n}.float())", "{n} - {x}", "torch.maximum({x}, {n})", "{x} * {n}.exp()",
)  # fmt: skip


@statement()
def input_without_dimensions(d: Draft) -> None:
    """A temperature, or a scale."""
    x, dtype = d.value(lambda v: v.dim() >= 1), d.pick((torch.float32, torch.float64, torch.bfloat16))
    d.let(d.pick(_NUMBERS).format(x=x, n=d.input((), dtype)))
