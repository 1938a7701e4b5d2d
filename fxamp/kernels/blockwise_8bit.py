"""Floats in fewer bits: 8-bit codes with one scale for every 256 elements, and stochastic rounding.

A code is a small float: the exponent and mantissa of a value relative to a power of two, the exponent of its block's
largest value. So a scale is an exponent, encoding a decoded value returns the same code, and both directions are shifts
of float32's bits. A lookup table, such as bitsandbytes' dynamic code, would have to be searched. Blocks of 256 and a
wide range for second moments come from Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv
2110.02861).

             sign  bits of exponent  of mantissa  smallest value above 0, relative to the block's largest value
    s3m4     yes          3               4       2**-10
    u5m3     no           5               3       2**-33; values above 0 never become 0
    e4m3fn   yes          4               3       2**-17; the bits are those of float8_e4m3fn

Random bits are a hash (triple32, github.com/skeeto/hash-prospector) of the element's index and of a key. The key is a
hash of the parameter's stream and of the count of steps, which the step itself advances on the device: a replayed CUDA
graph draws new bits each time. The bits are the same on every rank and in every implementation. If an element is
rounded several times in one step, each further rounding multiplies the hash once more by a constant with good lattice
structure (L'Ecuyer, "Tables of Linear Congruential Generators of Different Sizes and Good Lattice Structure", 1999).
That takes one instruction, where another hash takes eleven. Only a product's upper bits are random enough to use.

The functions below consist of ATen ops. They are registered as ops, so that they stay visible in a graph: a generated
kernel has its own code for each, and Inductor fuses the ATen ops. They also take rows of one block each, with int32
scales.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK = 256
SCALES = torch.int16
"""The dtype of scales, which are float32 exponents, biased by 127."""

LARGEST = 253
"""The largest exponent of a scale: the reciprocal of the next is subnormal. 255 stands for inf or NaN in the block."""


@dataclass(frozen=True)
class Code:
    """An 8-bit format. ``exponent``, ``mantissa``: their numbers of bits; ``top``: the code of the largest value."""

    signed: bool
    exponent: int
    mantissa: int
    top: int

    @property
    def normal(self) -> int:
        """:attr:`least` as float32's bits."""
        return (128 - (1 << self.exponent) + 1) << 23

    @property
    def least(self) -> float:
        """The smallest normal value."""
        return float(2.0 ** (2 - (1 << self.exponent)))

    @property
    def quantum(self) -> float:
        """The smallest value above 0."""
        return self.least * 2.0**-self.mantissa


CODES = {"s3m4": Code(True, 3, 4, 0x7F), "u5m3": Code(False, 5, 3, 0xFF), "e4m3fn": Code(True, 4, 3, 0x7E)}

ROUNDS = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))
"""The rounds of the hash, each a shift in bits and a factor; a final shift by :data:`LAST` follows."""
LAST = 14
SUCCESSOR = 747796405
"""The multiplier, modulo 2**32, that leads from one element's random bits to its next ones."""
STRIDE = 0x85EBCA77 - (1 << 32)
"""The difference between the keys of successive steps before they are hashed."""
UPPER_HALF = -(1 << 16)
"""A mask, as int32, for the bits of a float32 that a bfloat16 has."""


def signed(bits: int) -> int:
    """The int32 with these 32 bits."""
    return bits - (1 << 32) if bits >> 31 else bits


def mixed(x: Tensor) -> Tensor:
    """Hash int32 by triple32; a mask makes the right shifts logical."""
    for shift, factor in ROUNDS:
        x = (x ^ ((x >> shift) & ((1 << (32 - shift)) - 1))) * signed(factor)
    return x ^ ((x >> LAST) & ((1 << (32 - LAST)) - 1))


def successor(slot: int) -> int:
    """The factor, as int32, that turns an element's hash into the random bits of the rounding number ``slot``."""
    return signed(pow(SUCCESSOR, slot, 1 << 32))


def random_bits(like: Tensor, key: Tensor, slot: int) -> Tensor:
    """Random int32 for each element, good in the upper bits; ``slot`` numbers the uses of a key."""
    index = torch.arange(like.numel(), dtype=torch.int32, device=like.device).view(like.shape)
    return mixed(index ^ key) * successor(slot)


def _draw_key(count: Tensor, stream: Tensor) -> Tensor:
    return mixed(stream ^ mixed(count * STRIDE + 1))


def _block_scales(value: Tensor) -> Tensor:
    bits = value.view(torch.int32) & 0x7FFFFFFF
    if value.dim() == 2:
        return bits.amax(dim=1) >> 23
    count = -(-value.shape[0] // BLOCK)
    padded = torch.nn.functional.pad(bits, (0, count * BLOCK - value.shape[0]))
    return (padded.view(count, BLOCK).amax(dim=1) >> 23).to(SCALES)


def _spread(scales: Tensor, like: Tensor) -> Tensor:
    if like.dim() == 2:
        return scales.unsqueeze(1)
    return scales.to(torch.int32).unsqueeze(1).expand(-1, BLOCK).reshape(-1)[: like.shape[0]]


def _encode(value: Tensor, scales: Tensor, key: Tensor, code: str, slot: int) -> Tensor:
    form = CODES[code]
    bits = value.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF if form.signed else bits.clamp(min=0)
    # A power of two makes the block's largest magnitude 1.xxx, so x is exact, and a code's exponent is relative to it.
    exponents = _spread(scales, value).clamp(max=LARGEST)
    x = magnitude.view(torch.float32) * ((254 - exponents) << 23).view(torch.float32)
    # Added before the bits below a code are truncated: one half, or random bits between 0 and 1.
    shift = 23 - form.mantissa
    part: Any = 1 << (shift - 1)
    if slot >= 0:
        part = (random_bits(value, key, slot) >> (32 - shift)) & ((1 << shift) - 1)
    # Codes are float32's leading bits; below the smallest normal value they count multiples of the quantum.
    small = torch.round(x * ((1 << shift) / form.quantum)).to(torch.int32)
    large = x.view(torch.int32) - (form.normal - (1 << 23))
    codes: Tensor = ((torch.where(x < form.least, small, large) + part) >> shift).clamp(max=form.top)
    if form.signed:
        return (codes | ((bits >> 24) & 0x80)).to(torch.uint8)
    return torch.maximum(codes, magnitude.clamp(max=1)).to(torch.uint8)


def _decode(codes: Tensor, scales: Tensor, code: str) -> Tensor:
    form = CODES[code]
    wide = codes.to(torch.int32)
    magnitude = wide & 0x7F if form.signed else wide
    small = magnitude.to(torch.float32) * form.quantum
    large = (((magnitude - (1 << form.mantissa)) << (23 - form.mantissa)) + form.normal).view(torch.float32)
    exponents = _spread(scales, codes)
    exponents = torch.where(exponents == 255, exponents, exponents.clamp(max=LARGEST))
    # The scale 255 makes the whole block inf or NaN, so that an overflow is not lost.
    value = torch.where(magnitude < (1 << form.mantissa), small, large) * (exponents << 23).view(torch.float32)
    return torch.where(wide >= 0x80, -value, value) if form.signed else value


def _stochastic_round(value: Tensor, key: Tensor, slot: int) -> Tensor:
    # Adding 16 random bits carries into the upper half with a probability proportional to the lower half.
    bits = value.view(torch.int32) + ((random_bits(value, key, slot) >> 16) & 0xFFFF)
    rounded = (bits & UPPER_HALF).view(torch.float32).to(torch.bfloat16)  # Inductor's vectors have no 16-bit integers
    return torch.where(value.isnan(), torch.full((), float("nan"), dtype=torch.bfloat16, device=value.device), rounded)


_OPS: dict[str, Callable[..., Tensor]] = {
    "draw_key(Tensor count, Tensor stream) -> Tensor": _draw_key,
    "block_scales(Tensor value) -> Tensor": _block_scales,
    "encode(Tensor value, Tensor scales, Tensor key, str code, int slot) -> Tensor": _encode,
    "decode(Tensor codes, Tensor scales, str code) -> Tensor": _decode,
    "stochastic_round(Tensor value, Tensor key, int slot) -> Tensor": _stochastic_round,
}
_library = torch.library.Library("fxamp", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema, _function in _OPS.items():
    _library.impl(_library.define(_schema), _function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]

draw_key = torch.ops.fxamp.draw_key
"""``(count, stream) -> key``: 0-dim int32 each; the key of random bits in the step of that number."""
block_scales = torch.ops.fxamp.block_scales
"""``(value) -> scales``: int16 ``[ceil(n / 256)]`` of a flat float32 ``[n]``."""
encode = torch.ops.fxamp.encode
"""``(value, scales, key, code, slot) -> codes``: uint8 ``[n]``; ``slot < 0`` rounds to nearest, and reads no key."""
decode = torch.ops.fxamp.decode
"""``(codes, scales, code) -> value``: float32 ``[n]``."""
stochastic_round = torch.ops.fxamp.stochastic_round
"""``(value, key, slot) -> bfloat16 [n]``: each element becomes one of its two neighbours, without bias."""

DECOMPOSITIONS: dict[Any, Any] = {
    getattr(torch.ops.fxamp, schema.partition("(")[0]).default: function for schema, function in _OPS.items()
}
"""The same in ATen ops, for Inductor."""
