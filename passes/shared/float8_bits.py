"""float8_e4m3fn by integer arithmetic on float32's bits, for GPUs whose compiler has no conversion.

The codes equal those of torch's conversion, bit for bit: a sign, 4 bits of exponent with bias 7, 3 bits of mantissa,
rounded to the nearest, ties to even. Below ``2**-6`` a code counts multiples of ``2**-9``.
"""

from collections.abc import Callable
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

aten, prims = torch.ops.aten, torch.ops.prims

Call = Callable[..., Node]
"""Inserts a call of an op into a graph, and returns its node."""

_SMALLEST_NORMAL, _QUANTUM = 2.0**-6, 2.0**-9
_NAN, _SIGN = 0x7F, 0x80
#: The mantissa has 20 bits fewer than float32's; the exponents' biases, 127 and 7, differ by 120.
_SHIFT, _BIAS = 20, 120 << 23


def encode(call: Call, value: Node) -> Node:
    """Insert nodes for the codes, uint8, of float32 values from -448 to 448, or NaN."""
    bits = call(aten.view.dtype, value, torch.int32)
    sign = call(aten.bitwise_and.Scalar, call(aten.bitwise_right_shift.Tensor_Scalar, bits, 24), _SIGN)
    magnitude = call(aten.abs.default, value)
    counted = call(aten.round.default, call(aten.mul.Tensor, magnitude, 1.0 / _QUANTUM))
    small = call(prims.convert_element_type.default, counted, torch.int32)
    bits = call(aten.bitwise_and.Scalar, bits, 0x7FFFFFFF)
    odd = call(aten.bitwise_and.Scalar, call(aten.bitwise_right_shift.Tensor_Scalar, bits, _SHIFT), 1)
    half = (1 << (_SHIFT - 1)) - 1
    rounded = call(aten.add.Tensor, call(aten.add.Tensor, bits, odd), half - _BIAS)
    large = call(aten.bitwise_right_shift.Tensor_Scalar, rounded, _SHIFT)
    code = call(aten.where.self, call(aten.lt.Scalar, magnitude, _SMALLEST_NORMAL), small, large)
    code = call(aten.where.self, call(aten.ne.Tensor, value, value), _number(call, _NAN, code), code)
    return call(prims.convert_element_type.default, call(aten.bitwise_or.Tensor, code, sign), torch.uint8)


def decode(call: Call, codes: Node) -> Node:
    """Insert nodes for the float32 values of uint8 codes."""
    wide = call(prims.convert_element_type.default, codes, torch.int32)
    code = call(aten.bitwise_and.Scalar, wide, _NAN)
    small = call(aten.mul.Tensor, call(prims.convert_element_type.default, code, torch.float32), _QUANTUM)
    bits = call(aten.add.Tensor, call(aten.mul.Tensor, code, 1 << _SHIFT), _BIAS)
    large = call(aten.view.dtype, bits, torch.float32)
    magnitude = call(aten.where.self, call(aten.lt.Scalar, code, 8), small, large)
    magnitude = call(aten.where.self, call(aten.eq.Scalar, code, _NAN), _number(call, nan, magnitude), magnitude)
    negative = call(aten.ge.Scalar, wide, _SIGN)
    return call(aten.where.self, negative, call(aten.neg.default, magnitude), magnitude)


def _number(call: Call, number: float, like: Node) -> Node:
    value: Any = like.meta["val"]
    assert isinstance(value, Tensor)
    return call(aten.full.default, [], number, dtype=value.dtype, device=value.device)
