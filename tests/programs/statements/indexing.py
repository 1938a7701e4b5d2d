"""Indexing, masks, scatters."""

from programs.draft import Draft
from programs.statements.registry import statement

_READS = (
    "{}[torch.tensor([1, 0])]", "{}.index_select(0, torch.tensor([0, 0, 1]))", "{}[..., -1]", "{}.flip(-1)",
    "{}.masked_fill({} > 0, 0.5)", "torch.where({} > 0, {}, 0.0)",
    "{}.gather(-1, torch.zeros_like({}, dtype=torch.int64))", "{}.tril()", "{}.masked_fill({} > 0, float('-inf'))",
    "{}.take_along_dim({}.argsort(-1), -1)", "{}.repeat(2, *[1] * {}.dim())[:4]",
    "{}[:, [0, 1]]", "{}[[0, 1], [1, 0]]", "{}[..., None, 0]", "{}[[0]]", "{}[:, -1:]",
    "{}[torch.tensor([[0, 1], [1, 0]])]", "{}[1, ..., 0]", "{}[:0]", "{}[True]", "{}[torch.tensor(1)]", "{}[-1, None]",
    "{}[torch.arange({}.shape[0]) % 2 == 0]",
    "{}.index_fill(0, torch.tensor([0]), 2.0)", "{}[{}.argmax()[None] % 2]", "torch.take({}, torch.tensor([0, 1]))",
)  # fmt: skip


@statement(weight=2)
def index(d: Draft) -> None:
    x, read = d.value(lambda v: v.dim() >= 1), d.pick(_READS)
    d.sizes_vary |= "% 2 == 0]" in read
    d.let(read.replace("{}", x))


_SCATTERS = (
    "{0}.index_add(0, torch.tensor([0]), {1}[:1])", "{0}.index_copy(0, torch.tensor([0]), {1}[:1])",
    "{0}.scatter_add(-1, torch.zeros_like({0}, dtype=torch.int64), {1})",
    "torch.index_put({0}, (torch.tensor([0]),), {1}[0])", "{0}.masked_scatter({0} > 0, {1})",
    "{0}.select_scatter({1}[0], 0, 0)", "{0}.slice_scatter({1}[:1], 0, 0, 1)",
    "{0}.scatter(-1, torch.zeros_like({0}, dtype=torch.int64), {1})", "torch.where({0} > {1}, {0}, {1})",
    "{0}.scatter_reduce(-1, torch.zeros_like({0}, dtype=torch.int64), {1}, 'sum')",
)  # fmt: skip


@statement(weight=2)
def scatter(d: Draft) -> None:
    x = d.value(lambda v: v.dim() >= 1)
    d.let(d.pick(_SCATTERS).format(x, d.alike(x)))


@statement()
def embedding(d: Draft) -> None:
    table = d.parameter(8, d.pick((8, 4)))
    d.let(f"F.embedding(torch.tensor([[0, 1, 2, 1], [3, 7, 1, 0]]), {table})")
