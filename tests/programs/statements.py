"""The statements that random programs are made of. A kind is a function here: it draws its operands and writes a line.

To add one, write a function under :func:`statement`; its name is what counts and failures are reported under. Failures
shrink towards what stands first: in :data:`STATEMENTS`, in a table, among a draw's options.
"""

from collections.abc import Callable

from programs.draft import Draft

Kind = Callable[[Draft], None]

#: Every kind by name, the plainest first.
STATEMENTS: dict[str, Kind] = {}


def statement(kind: Kind) -> Kind:
    STATEMENTS[kind.__name__] = kind
    return kind


_UNARY = ("{}.relu()", "{}.sigmoid()", "{}.tanh()", "F.gelu({})", "{} * 2", "{} + 1", "{}.exp()", "F.silu({})", "-{}")
_BINARY = ("{} + {}", "{} * {}", "{} - {}", "torch.maximum({}, {})", "torch.where({0} > 0, {0}, {1})")


@statement
def pointwise(d: Draft) -> None:
    d.let(d.pick(_UNARY).format(d.value()))


@statement
def binary(d: Draft) -> None:
    a = d.value()
    b = d.value(lambda v: tuple(v.shape) == d.shape(a))
    d.let(d.pick(_BINARY).format(a, b))


@statement
def linear(d: Draft) -> None:
    x = d.value(lambda v: v.dim() >= 2)
    out = d.pick((8, 4))
    weight = d.parameter(out, d.shape(x)[-1])
    bias = f", {d.parameter(out)}" if d.chance() else ""
    d.let(f"F.linear({x}, {weight}{bias})")


_PRODUCTS = ("{} @ {}", "torch.matmul({}, {})", "torch.mm({}, {})", "torch.addmm({1}[0], {0}, {1})")


@statement
def matmul(d: Draft) -> None:
    x = d.value(lambda v: v.dim() == 2)
    wanted = d.shape(x)[-1]
    if d.chance():
        other = d.parameter(wanted, d.pick((8, 4)))
    else:
        y = d.value(lambda v: v.dim() == 2 and wanted in v.shape)
        other = y if d.shape(y)[0] == wanted else f"{y}.t()"
    d.let(d.pick(_PRODUCTS).format(x, other))


_REDUCTIONS = (
    "{}.sum(-1)", "{}.mean(0)", "{}.sum()", "{}.softmax(-1)", "{}.log_softmax(-1)", "{}.cumsum(0)", "{}.amax(-1)",
    "{}.prod(-1)", "{}.norm(dim=-1)", "{}.mean(-1, keepdim=True)", "{}.logsumexp(0)", "{}.var(-1)",
)  # fmt: skip


@statement
def reduction(d: Draft) -> None:
    d.let(d.pick(_REDUCTIONS).format(d.value(lambda v: v.dim() >= 1)))


_VIEWS = (
    "{}.t()",
    "{}[0]",
    "{}[1:]",
    "{}[..., :4]",
    "{}.view(-1)",
    "{}.unsqueeze(0)",
    "{}[None, 0]",
)


@statement
def view(d: Draft) -> None:
    d.let(d.pick(_VIEWS).format(d.value(lambda v: v.dim() >= 1)))


_CASTS = ("float", "half", "bfloat16")


@statement
def cast(d: Draft) -> None:
    x = d.value()
    d.let(f"{x}.{d.pick(_CASTS)}()", truth=f"{x}.double()")


@statement
def cast_like(d: Draft) -> None:
    d.let(f"{d.value()}.to({d.value()})")


_IN_PLACE = ("{}.add_(1)", "{}.mul_(2)", "{}.relu_()", "{}.zero_()", "{}[0] = 0", "F.relu({}, inplace=True)", "{} += 1")


@statement
def write(d: Draft) -> None:
    d.do(d.pick(_IN_PLACE).format(d.value(lambda v: v.dim() >= 1)))


_IN_PLACE_BY = ("{}.add_({})", "{}.mul_({})", "{}.copy_({})", "{}[:] = {}")


@statement
def write_value(d: Draft) -> None:
    x = d.value(lambda v: v.dim() >= 1)
    y = d.value(lambda v: tuple(v.shape) == d.shape(x))
    d.do(d.pick(_IN_PLACE_BY).format(x, y))


@statement
def detach(d: Draft) -> None:
    d.let(f"{d.value()}.detach()")
