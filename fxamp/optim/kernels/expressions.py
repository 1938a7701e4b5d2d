"""Tables of the Triton expressions for the ops of an optimizer's step.

Values are float32, float64, int32, int64 or bool. 16-bit floats are computed in float32, and rounded where the graph
rounds them. Division and square root are IEEE-exact, not CUDA's faster float32 versions.
"""

from collections.abc import Callable
from typing import Any

import torch

aten, prims = torch.ops.aten, torch.ops.prims

CARRIED = {
    torch.float16: "float32",
    torch.bfloat16: "float32",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "int32",
    torch.int16: "int32",
    torch.bool: "int1",
}
"""Triton's name of the type in which a value of each dtype is computed."""


def power(base: str, exponent: str) -> str:
    """``base ** exponent`` in float64, through logarithms; their error of a few units is lost when it is rounded."""
    magnitude = f"tl.exp2({exponent} * tl.log2(tl.abs({base})))"
    odd = f"({exponent} - 2.0 * tl.floor({exponent} * 0.5) == 1.0)"
    signed = f"tl.where(({base} < 0.0) & {odd}, -{magnitude}, {magnitude})"
    return f"tl.where({exponent} == 0.0, 1.0, {signed})"


def divide(a: str, b: str, kind: str) -> str:
    return f"tl.div_rn({a}, {b})" if kind == "float32" else f"({a} / {b})"


def root(a: str, kind: str) -> str:
    return f"tl.sqrt_rn({a})" if kind == "float32" else f"tl.sqrt({a})"


def reciprocal(a: str, kind: str) -> str:
    return divide(f"tl.full((), 1.0, tl.{kind})", a, kind)


def lerp(a: str, b: str, weight: str, kind: str) -> str:
    """Torch's formula, which is exact at both ends: from the nearer end. A 0-dim weight chooses the end only once."""
    near = f"(tl.abs({weight}) < 0.5)"
    return f"(tl.where({near}, {a}, {b}) + tl.where({near}, {weight}, {weight} - 1.0) * ({b} - {a}))"


def nan_max(a: str, b: str, kind: str) -> str:
    return f"tl.maximum({a}, {b}, propagate_nan=tl.PropagateNan.ALL)"


def nan_min(a: str, b: str, kind: str) -> str:
    return f"tl.minimum({a}, {b}, propagate_nan=tl.PropagateNan.ALL)"


def sign(a: str, kind: str) -> str:
    return f"tl.where({a} > 0, 1.0, tl.where({a} < 0, -1.0, {a}))"


def _binary(symbol: str) -> Callable[..., str]:
    return lambda a, b, kind: f"({a} {symbol} {b})"


def _unary(form: str) -> Callable[..., str]:
    return lambda a, kind: form.format(a)


ARITHMETIC: dict[Any, Callable[..., str]] = {
    aten.neg.default: _unary("(-{})"),
    aten.abs.default: _unary("tl.abs({})"),
    aten.exp.default: _unary("tl.exp({})"),
    aten.log.default: _unary("tl.log({})"),
    aten.floor.default: _unary("tl.floor({})"),
    aten.ceil.default: _unary("tl.ceil({})"),
    aten.sqrt.default: root,
    aten.rsqrt.default: lambda a, kind: reciprocal(root(a, kind), kind),
    aten.reciprocal.default: reciprocal,
    aten.square.default: lambda a, kind: f"({a} * {a})",
    aten.sign.default: sign,
    aten.sgn.default: sign,
    aten.mul.Tensor: _binary("*"),
    aten.mul.Scalar: _binary("*"),
    aten.div.Tensor: divide,
    aten.div.Scalar: divide,
    aten.maximum.default: nan_max,
    aten.minimum.default: nan_min,
    aten.clamp_min.default: nan_max,
    aten.clamp_min.Tensor: nan_max,
    aten.clamp_max.default: nan_min,
    aten.clamp_max.Tensor: nan_min,
    aten.lerp.Tensor: lerp,
    aten.lerp.Scalar: lerp,
    aten.bitwise_and.Tensor: _binary("&"),
    aten.bitwise_and.Scalar: _binary("&"),
    aten.bitwise_xor.Tensor: _binary("^"),
    aten.bitwise_xor.Scalar: _binary("^"),
    aten.bitwise_or.Tensor: _binary("|"),
    aten.bitwise_or.Scalar: _binary("|"),
    aten.__rshift__.Scalar: _binary(">>"),
    aten.bitwise_right_shift.Tensor_Scalar: _binary(">>"),
    aten.logical_and.default: _binary("&"),
    aten.logical_or.default: _binary("|"),
    aten.bitwise_not.default: _unary("(~{})"),
    aten.logical_not.default: _unary("({} == 0)"),
}
"""Ops whose inputs are computed in the dtype of their result. ``kind``: the name of its type."""

COMPARISONS: dict[Any, str] = {
    op: symbol
    for name, symbol in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items()
    for op in (getattr(aten, name).Scalar, getattr(aten, name).Tensor)
}
"""Ops whose inputs are compared in their common dtype."""

SAME = frozenset(
    {
        aten.clone.default,
        aten.detach.default,
        aten.alias.default,
        aten.lift_fresh_copy.default,
        aten._to_copy.default,
        prims.convert_element_type.default,
        aten.as_strided.default,
        aten.expand.default,
    }
)
"""Ops that return their input, possibly in another dtype."""
