"""Casts that the user wrote, and what cuts gradients."""

import torch
from programs.draft import Draft, Unfit
from programs.statements.registry import statement

_CASTS = (
    "{}.float()", "{}.half()", "{}.bfloat16()", "{}.to(torch.float32)", "{}.double()",
    "{}.to(torch.float16, copy=True)",
)  # fmt: skip


@statement(weight=2)
def cast(d: Draft) -> None:
    x = d.value()
    d.let(d.pick(_CASTS).format(x))


_LIKE = ("{}.to({})", "{}.type_as({})", "{0}.to({1}, copy=True)")


@statement()
def cast_like(d: Draft) -> None:
    d.let(d.pick(_LIKE).format(d.value(), d.value()))


_SAME = (
    "{}.to('cpu')", "{}.cpu()", "{}.contiguous()", "{}.view_as({})", "{}.requires_grad_({}.requires_grad)",
    "{}.to(copy=True)",
)  # fmt: skip


@statement()
def no_cast(d: Draft) -> None:
    d.let(d.pick(_SAME).replace("{}", d.value()))


_LIKENESSES = (
    "torch.zeros_like({})", "{}.new_ones(4, 8)", "torch.full_like({}, 0.1)",
    "torch.ones_like({}, dtype=torch.float32)",
)  # fmt: skip


@statement()
def new_like(d: Draft) -> None:
    d.let(d.pick(_LIKENESSES).format(d.value()))


@statement()
def detach(d: Draft) -> None:
    d.let(f"{d.value()}.detach()")


_BAKED = (
    "{}.to({}.dtype)", "torch.zeros(4, 8, dtype={1}.dtype) + {0}", "{}.softmax(-1, dtype={}.dtype)",
    "{0}.masked_fill({0} > 0, torch.finfo({0}.dtype).min)", "torch.full((4, 8), 0.1, dtype={1}.dtype) * {0}",
    "{}.sum(dtype={}.dtype)",
)  # fmt: skip


@statement()
def baked(d: Draft) -> None:
    """Dynamo takes a tensor's dtype for a constant, which is right only where it captures under autocast."""
    if not d.setting.ambient:
        raise Unfit
    x = d.value(lambda v: v.dim() >= 1)
    d.let(d.pick(_BAKED).format(x, d.value()))


@statement()
def bits(d: Draft) -> None:
    """Those of float32, as captured, whatever dtype the policy computes in; the oracle says so."""
    x = d.value()
    if d.setting.ambient or d.captured_dtype(x) is not torch.float32:
        raise Unfit
    code = "({}.clone().view(torch.int32) & -131072).view(torch.float32)"
    widened = code.format(f"{x}.float()")
    d.let(code.format(x), oracle=widened, alone=widened)
