"""Sparse operands, made in the program, and sparse gradients."""

from programs.draft import Draft, Unfit
from programs.statements.registry import statement

_PRODUCTS = ("{} @ {}", "torch.mm({}, {})", "({} @ {}.float()).float()")

_SPARSE = (
    "torch.eye({0}).to_sparse()",
    "torch.ones({0}, {0}).tril().to_sparse()",
    "torch.eye({0}).flip(0).to_sparse()",
)


@statement()
def sparse_product(d: Draft) -> None:
    """A constant sparse matrix times a value. Under autocast ``torch.sparse.mm`` has no backward."""
    x = d.ranked(2)
    matrix = d.pick(_SPARSE).format(d.shape(x)[0])
    d.let(d.pick(_PRODUCTS).format(f"({matrix})", x))


@statement()
def sparse_values(d: Draft) -> None:
    """Values that need a gradient become the elements of a sparse matrix."""
    x = d.value(lambda v: v.dim() == 2 and min(v.shape) >= 2)
    rows = d.shape(x)[0]
    matrix = f"torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), {x}[0, :2].float(), ({rows}, {rows}))"
    d.let(d.pick(("{0}.to_dense()", "{0} @ {1}", "torch.sparse.sum({0})")).format(matrix, x))


@statement()
def sparse_embedding(d: Draft) -> None:
    """Its gradient is a sparse tensor."""
    if d.setting.scaled or d.setting.schedule in ("train", "restart"):
        raise Unfit  # no optimizer that is used here takes it
    table = d.parameter(8, d.pick((8, 4)))
    d.let(f"F.embedding(torch.tensor([[0, 1, 2, 1], [3, 7, 1, 0]]), {table}, sparse=True)")
