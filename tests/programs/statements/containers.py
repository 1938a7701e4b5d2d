"""Values in lists, dicts and named tuples, as keyword and default arguments, and results that are picked by name."""

from programs.draft import Draft
from programs.statements.registry import statement

_PASSED = (
    "(lambda x, scale={y}: x * scale)({x})", "(lambda *, a, b=None: a if b is None else a + b)(a={x}, b={y})",
    "(lambda x, y=None: x if y is None else x * y)({x})", "dict(a={x}, b={y})['b'] * 2",
    "sum([{x}, {y}, {x}])", "(lambda *parts: torch.cat(parts))({x}, {y})", "(lambda **named: named['a'] - 1)(a={x})",
    "[v * 2 for v in ({x}, {y})][1]", "{{'k': [{x}, ({y}, {x})]}}['k'][1][0] + 1", "max([{x}, {y}], key=len) * 2",
    "(lambda f: f({x}) + {y})(lambda v: v * v)",
)  # fmt: skip


@statement()
def passed(d: Draft) -> None:
    x = d.value(lambda v: v.dim() >= 1)
    d.let(d.pick(_PASSED).format(x=x, y=d.alike(x)))


_PICKED = (
    "{}.max(-1).values", "{}.sort(-1, descending=True).values", "{}.topk(2, -1).values", "torch.var_mean({}, -1)[1]",
    "{}.min(0)[0]", "{}.median(-1).values", "{}.split(1)[0]", "{}.chunk(2, -1)[1][..., 0]", "{}.unbind(0)[-1]",
    "torch.linalg.qr({}.float())[1].abs()", "{}.cummax(0).values", "{}.kthvalue(1, -1).values",
    "torch.aminmax({}, dim=-1).max", "torch.slogdet({0}.float() @ {0}.float().mT + torch.eye({0}.shape[-2]))[1]",
)  # fmt: skip


@statement()
def picked(d: Draft) -> None:
    """The others of the results are unread."""
    x = d.value(lambda v: v.dim() >= 1)
    d.let(d.pick(_PICKED).replace("{0}", "{}").replace("{}", x))


_COUNTED = (
    "{}.argmax(-1)", "({} > 0).sum(-1)", "{}.detach().round().long() % 4", "({} > 0) & ({} < 1)", "({} == {}.amax())",
    "{}.argsort(-1)", "torch.sign({}).to(torch.int32)", "{}.isnan() | ({} > 0)", "{}.count_nonzero(-1)",
)  # fmt: skip


@statement()
def counted(d: Draft) -> None:
    """Integers and truth values, which may be returned; perhaps they go on as numbers."""
    x = d.value(lambda v: v.dim() >= 1)
    n = d.let(d.pick(_COUNTED).replace("{}", x))
    if d.chance():
        d.let(d.pick(("{n} * 0.5", "{n}.float().mean() * {x}", "{n}.to({x}) / 3", "{x} + {n}.sum()")).format(n=n, x=x))
