"""The Triton expressions for the ops of an optimizer's step.

Values are float32, float64, int32, int64 or bool. 16-bit floats are computed in float32, and rounded where the graph
rounds them. Division and square root are IEEE-exact, not CUDA's faster float32 versions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxamp.optim.kernels.scalar_nodes import is_flat

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


class NotGeneratedError(Exception):
    """No kernel can be generated for something in the graph; the message says what. Never reaches the user."""


def power(base: str, exponent: str) -> str:
    """``base ** exponent`` in float64, through logarithms; rounding removes their error of a few units."""
    magnitude = f"tl.exp2({exponent} * tl.log2(tl.abs({base})))"
    odd = f"({exponent} - 2.0 * tl.floor({exponent} * 0.5) == 1.0)"
    signed = f"tl.where(({base} < 0.0) & {odd}, -{magnitude}, {magnitude})"
    return f"tl.where({exponent} == 0.0, 1.0, {signed})"


def divide(a: str, b: str, kind: str) -> str:
    return f"tl.div_rn({a}, {b})" if kind == "float32" else f"({a} / {b})"


def root(a: str, kind: str) -> str:
    return f"tl.sqrt_rn({a})" if kind == "float32" else f"tl.sqrt({a})"


def number(text: str, kind: str) -> str:
    """A literal as a 0-dim value of its type; Triton's functions would take it for a float32."""
    return f"tl.full((), {text}, tl.{kind})"


def reciprocal(a: str, kind: str) -> str:
    return divide(number("1.0", kind), a, kind)


def lerp(a: str, b: str, weight: str, kind: str) -> str:
    """Torch's formula, which is exact at both ends: from the nearer end. A 0-dim weight chooses the end only once."""
    near = f"(tl.abs({weight}) < 0.5)"
    return f"(tl.where({near}, {a}, {b}) + tl.where({near}, {weight}, {weight} - 1.0) * ({b} - {a}))"


def nan_max(a: str, b: str, kind: str) -> str:
    return f"tl.maximum({a}, {b}, propagate_nan=tl.PropagateNan.ALL)"


def nan_min(a: str, b: str, kind: str) -> str:
    return f"tl.minimum({a}, {b}, propagate_nan=tl.PropagateNan.ALL)"


def sign(a: str, kind: str) -> str:
    return f"(({a} > 0).to(tl.{kind}) - ({a} < 0).to(tl.{kind}))"


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
    aten.lerp.Scalar: lambda a, b, weight, kind: lerp(a, b, number(weight, kind), kind),
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


@dataclass(frozen=True)
class Expressions:
    """Writes what nodes compute; ``name`` returns the kernel's name of a node's value."""

    name: Callable[[object], str]

    def of(self, node: Node) -> str:
        """Return the expression of the node's value.

        Raises:
            NotGeneratedError: no table has the op, or a dtype.
        """
        target, args, kwargs = node.target, list(node.args), node.kwargs
        dtype = value_dtype(node)
        kind = CARRIED[dtype]
        if target in SAME:
            return self.operand(args[0], dtype)
        if target is aten.copy.default:
            return self.operand(args[1], dtype)
        if target in (aten.full.default, aten.scalar_tensor.default):
            return number(_literal(args[-1] if target is not aten.full.default else args[1]), kind)
        if target is aten.where.self:
            return f"tl.where({self.name(args[0])}, {self.operand(args[1], dtype)}, {self.operand(args[2], dtype)})"
        if target in COMPARISONS:
            return self._comparison(node)
        if target in (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar):
            return self._sum(node, dtype)
        if target in (aten.addcmul.default, aten.addcdiv.default):
            a, b, c = (self.operand(value, dtype) for value in args[:3])
            factor = kwargs.get("value", 1)
            first = b if factor == 1 else f"({self.operand(factor, dtype)} * {b})"
            return f"({a} + {f'{first} * {c}' if target is aten.addcmul.default else divide(first, c, kind)})"
        if target in (aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar):
            return self._power(node, dtype)
        if target is aten.clamp.default:
            return self._clamp(node, dtype)
        if target in ARITHMETIC and not kwargs:
            return ARITHMETIC[target](*(self.operand(value, dtype) for value in args), kind=kind)
        raise NotGeneratedError(f"its step calls {target}")

    def _sum(self, node: Node, dtype: torch.dtype) -> str:
        a, b = (self.operand(value, dtype) for value in node.args[:2])
        alpha = node.args[2] if len(node.args) > 2 else node.kwargs.get("alpha", 1)
        if node.target is aten.rsub.Scalar:
            a, b = b, a
        if alpha != 1:
            b = f"{self.operand(alpha, dtype)} * {b}"
        return f"({a} {'+' if node.target in (aten.add.Tensor, aten.add.Scalar) else '-'} {b})"

    def _comparison(self, node: Node) -> str:
        a, b = node.args[:2]
        values: list[Any] = [operand.meta["val"] if isinstance(operand, Node) else operand for operand in (a, b)]
        common = torch.result_type(*values)
        return f"({self.operand(a, common)} {COMPARISONS[node.target]} {self.operand(b, common)})"

    def _power(self, node: Node, dtype: torch.dtype) -> str:
        base, exponent = node.args[:2]
        small = {1: "{0}", 2: "({0} * {0})", 3: "({0} * {0} * {0})"}
        if isinstance(exponent, (int, float)) and exponent in small:
            return small[int(exponent)].format(self.operand(base, dtype))
        if exponent == 0.5:
            return root(self.operand(base, dtype), CARRIED[dtype])
        if is_flat(node):
            raise NotGeneratedError(f"its step raises each element to the power {exponent}")
        wide = torch.float64
        base_text = self.operand(base, wide) if isinstance(base, Node) else number(_literal(base), CARRIED[wide])
        return f"({power(base_text, self.operand(exponent, wide))}).to(tl.{CARRIED[dtype]})"

    def _clamp(self, node: Node, dtype: torch.dtype) -> str:
        value = self.operand(node.args[0], dtype)
        low, high = (*node.args[1:], None, None)[:2]
        low, high = node.kwargs.get("min", low), node.kwargs.get("max", high)
        for bound, op in ((low, aten.clamp_min.default), (high, aten.clamp_max.default)):
            if bound is not None:
                value = ARITHMETIC[op](value, self.operand(bound, dtype), kind=CARRIED[dtype])
        return value

    def operand(self, value: object, dtype: torch.dtype) -> str:
        """Return a value in the type that ``dtype`` is computed in; values of 16-bit dtypes are exact in float32."""
        if not isinstance(value, Node):
            return _literal(value)
        own = value_dtype(value)
        if own is torch.bool and not dtype.is_floating_point:
            return self.name(value)
        return self.name(value) if CARRIED[own] == CARRIED[dtype] else f"{self.name(value)}.to(tl.{CARRIED[dtype]})"

    def rounding(self, node: Node) -> list[str]:
        """Return the lines that round the node's value to its dtype; none if it needs none."""
        dtype = value_dtype(node)
        sources = [source for source in node.all_input_nodes if isinstance(source.meta["val"], Tensor)]
        if node.target in SAME and value_dtype(sources[0]) is dtype:
            return []
        return rounded(self.name(node), dtype) if node.target is not aten.where.self else []


def value_dtype(node: Node) -> torch.dtype:
    """Return the dtype of the node's value; raise NotGeneratedError if kernels have no type for it."""
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    if value.dtype not in CARRIED:
        raise NotGeneratedError(f"{node.name} is {value.dtype}")
    return value.dtype


def rounded(name: str, dtype: torch.dtype) -> list[str]:
    """Lines that round a float32 of this name to a 16-bit dtype, in place; none for other dtypes."""
    if dtype is torch.float16:
        return [f"{name} = {name}.to(tl.float16).to(tl.float32)"]
    if dtype is not torch.bfloat16:
        return []
    return [
        f"{name}_bits = {name}.to(tl.uint32, bitcast=True)",
        f"{name}_near = ({name}_bits + 0x7FFF + (({name}_bits >> 16) & 1)) >> 16 << 16  # to nearest, ties to even",
        f"{name} = tl.where({name} != {name}, 0x7FC00000, {name}_near).to(tl.float32, bitcast=True)",
    ]


def _literal(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise NotGeneratedError(f"an op reads {value!r}")
    if value in (float("inf"), float("-inf")) or value != value:
        return f'float("{value}")'
    return repr(value)
