"""Matrices in floats of 8 or 4 bits and their scales, by the recipes of :mod:`fxamp.policy`, and products of two.

The last dimension of a matrix is the one that the product sums over: the first operand is ``[rows, sum]``, the second,
transposed, ``[columns, sum]``. Values are row-major, so the second operand is column-major in the product, as GPUs need
it.

1. Values are multiplied by a float32 scale before they are rounded. It maps the largest magnitude of the tensor, or of
   a row, to the largest value of the dtype.
2. An e8m0 scale is a biased exponent in uint8, a power of two that decoded values of a block are multiplied by; 255 is
   NaN. The exponents are computed from the bits of the largest magnitude, so they are the same on every device.
3. Scales in e4m3 are relative to a float32 scale of the tensor (:mod:`fxamp.kernels.products.float4`).
4. If the largest magnitude is infinite or NaN, the results are NaN, so a loss scaler detects it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import frexp

import torch
from torch import Tensor, nn
from torch.nn import functional

from fxamp.errors import MachineError
from fxamp.kernels.products import float4
from fxamp.kernels.products.hadamard import transformed
from fxamp.policy import PACKED, ROW, TENSOR, Quantization

#: The smallest absolute value that a scale is computed from; torchao uses the same.
_SMALLEST = 1e-12

_CASTS_SATURATE = bool(torch.tensor(1e3, device="cpu").to(torch.float8_e4m3fn).float().isfinite())

TILE = 128, 4
"""Rows and blocks whose scales GPUs read together."""


@dataclass(frozen=True)
class Scale:
    """The scales of a matrix: 0-dim or ``[rows, 1]`` in float32, or bytes ``[rows, blocks]``.

    ``outer``: the scale of the tensor, 0-dim float32, which scales in e4m3 are relative to.
    """

    values: Tensor
    outer: Tensor | None = None


@dataclass(frozen=True)
class Quantized:
    """A matrix in 8 bits, or in 4 bits as uint8 ``[rows, sum / 2]``, and its scales."""

    values: Tensor
    scale: Scale
    form: Quantization


def quantize(matrix: Tensor, form: Quantization) -> Quantized:
    """Return ``matrix``, ``[rows, sum]``, quantized; ``sum`` is padded with zeros to :attr:`Quantization.multiple`."""
    matrix = prepared(matrix, form)
    scale = scale_of(matrix, form)
    return Quantized(rounded(matrix, scale, form), scale, form)


def prepared(matrix: Tensor, form: Quantization) -> Tensor:
    """Return the matrix to scale and round: ``matrix``, or padded and with its blocks Hadamard-transformed."""
    return transformed(_padded(matrix, form)) if form.hadamard else matrix


def quantize_transposed(matrix: Tensor, form: Quantization) -> Quantized:
    """Return the same bits as :func:`quantize` of ``matrix.t()``; ``matrix`` is ``[sum, rows]``.

    With one scale for all values, it transposes the quantized matrix: if the forward has quantized it, a compiler need
    not do so again.
    """
    if form.block != TENSOR or not _is_whole(matrix.shape[0], form):
        return quantize(matrix.t(), form)
    of_matrix = quantize(matrix, form)
    return replace(of_matrix, values=of_matrix.values.t().contiguous())


def scale_of(matrix: Tensor, form: Quantization) -> Scale:
    """Return the scales of ``matrix``, ``[rows, sum]``, after :func:`prepared`."""
    return _SCALES[form.scale_dtype](matrix, form)


def _float_scale(matrix: Tensor, form: Quantization) -> Scale:
    return scale_for(matrix.abs().amax() if form.block == TENSOR else matrix.abs().amax(-1, keepdim=True), form)


def scale_for(largest: Tensor, form: Quantization) -> Scale:
    """Return the float32 scales for these largest magnitudes."""
    # Compilers and eager mode divide float32 differently; a float64 quotient rounds to the same float32 in both.
    largest = largest.double()
    limit = torch.finfo(_dtype(form)).max
    scale = (limit / torch.where(largest < _SMALLEST, _SMALLEST, largest)).float()
    return Scale(torch.exp2(torch.floor(torch.log2(scale))) if form.scale_rounding == "power_of_2" else scale)


def rounded(matrix: Tensor, scale: Scale, form: Quantization) -> Tensor:
    """Return the rounded values of ``matrix``, ``[rows, sum]``, row-major, with ``sum`` padded."""
    values = _padded(scaled(matrix, scale, form), form)
    if form.dtype == PACKED:
        return float4.packed(values, form.stochastic)
    return values.to(_dtype(form)).contiguous()


def scaled(matrix: Tensor, scale: Scale, form: Quantization) -> Tensor:
    """Return the scaled values before rounding, in float32; for blocks, with ``sum`` padded.

    Float32 scales and "rceil" need no clamp: a value that exceeds the dtype's largest does so by a rounding error, and
    rounds back to it. A clamp would cost time, and Triton miscompiles transposed 8-bit stores beside the clamp that
    Inductor writes (triton #11111). So graphs traced for a GPU have none for "floor" either, because Triton's casts
    saturate. torch's own casts do so since 2.13.
    """
    if not isinstance(form.block, int):
        return matrix.float() * scale.values
    if scale.outer is not None:
        factor = float4.factors(scale.values, scale.outer)
    else:
        factor = ((254 - scale.values.int()).clamp(min=0) << 23).view(torch.float32)
    blocks = _blocks(matrix, form).float() * factor.unsqueeze(-1)
    if form.scale_rounding == "floor" and (emulates(matrix.device) or _casts_to_nan(matrix)):
        limit = torch.finfo(_dtype(form)).max
        blocks = blocks.clamp(-limit, limit)
    return blocks.flatten(-2)


def _casts_to_nan(matrix: Tensor) -> bool:
    """Whether torch's own cast converts ``matrix``, and turns values outside the 8-bit range into NaN."""
    return not _CASTS_SATURATE and type(matrix) in (Tensor, nn.Parameter)


def _dtype(form: Quantization) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, form.dtype)
    return dtype


def _padded(matrix: Tensor, form: Quantization) -> Tensor:
    size = matrix.shape[-1]
    return matrix if _is_whole(size, form) else functional.pad(matrix, (0, missing(size, form.multiple)))


def missing(size: int, multiple: int) -> int:
    """The padding from ``size`` to the next multiple; torch can prove this of a symbolic ``size`` plus the result."""
    return (size + multiple - 1) // multiple * multiple - size


def _is_whole(size: int, form: Quantization) -> bool:
    """Whether ``size`` is known to need no padding."""
    rest = size % form.multiple
    return isinstance(rest, int) and rest == 0


def _blocks(matrix: Tensor, form: Quantization) -> Tensor:
    """``[rows, blocks, block]``."""
    assert isinstance(form.block, int)
    padded = _padded(matrix, form)
    return padded.reshape(padded.shape[0], padded.shape[1] // form.block, form.block)


def _exponents(matrix: Tensor, form: Quantization) -> Scale:
    """Biased exponents, uint8 ``[rows, blocks]``."""
    bits = _blocks(matrix, form).abs().amax(-1).float().view(torch.int32)
    fraction, exponent = frexp(torch.finfo(_dtype(form)).max)
    # "rceil" carries into the exponent if the mantissa is above that of the dtype's largest value.
    carry = 0 if form.scale_rounding == "floor" else (1 << 24) - 1 - int(fraction * (1 << 24))
    biased = (((bits + carry) >> 23) - (exponent - 1)).clamp(min=0)
    return Scale(torch.where(bits >= 255 << 23, 255, biased).to(torch.uint8))


def _two_level_scales(matrix: Tensor, form: Quantization) -> Scale:
    """Bytes of e4m3 ``[rows, blocks]``, and the tensor's scale; :attr:`Quantization.rows` rows share theirs."""
    largest = _blocks(matrix, form).abs().amax(-1).float()
    if form.rows == 1:
        return Scale(*float4.block_scales(largest))
    tiles = largest.reshape(largest.shape[0] // form.rows, form.rows, largest.shape[1])
    scale, outer = float4.block_scales(tiles.amax(1))
    return Scale(scale.unsqueeze(1).expand(-1, form.rows, -1).flatten(0, 1), outer)


_SCALES: Mapping[str, Callable[[Tensor, Quantization], Scale]] = {
    "float32": _float_scale,
    "float8_e8m0fnu": _exponents,
    "float8_e4m3fn": _two_level_scales,
}


def multiply(left: Quantized, right: Quantized, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Return the product, ``[rows, columns]``, in ``dtype``; ``fast``: accumulate with fewer bits where GPUs can.

    With scales for rows or blocks, the kernels return bfloat16, so the product is rounded to that first.
    """
    kinds = {left.form.block, right.form.block}
    block = next((kind for kind in kinds if isinstance(kind, int)), ROW if ROW in kinds else TENSOR)
    return _PRODUCTS.get(block, _multiply_blocks)(left, right, dtype, fast)


def _multiply_tensorwise(left: Quantized, right: Quantized, dtype: torch.dtype, fast: bool) -> Tensor:
    scales = left.scale.values.reciprocal(), right.scale.values.reciprocal()
    return _scaled_mm(left.values, right.values, *scales, dtype, fast)


def _multiply_rowwise(left: Quantized, right: Quantized, dtype: torch.dtype, fast: bool) -> Tensor:
    """Without ``fast`` the scales multiply the product: no kernel does both. An operand may have a single scale."""
    of_left, of_right = left.scale.values.reciprocal(), right.scale.values.reciprocal()
    of_right = of_right.t() if of_right.dim() else of_right
    if fast:
        if left.values.device.type == "cpu" and torch.__version__ < "2.12":
            raise MachineError(f"torch {torch.__version__} multiplies operands with a scale for each row only on GPUs")
        return _scaled_mm(left.values, right.values, of_left, of_right, torch.bfloat16, fast).to(dtype)
    one = of_left.new_ones(())
    product = _scaled_mm(left.values, right.values, one, one, torch.bfloat16, fast)
    return (product * (of_left * of_right)).to(torch.bfloat16).to(dtype)


def _scaled_mm(
    left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    return torch._scaled_mm(left, right.t(), scale_a=of_left, scale_b=of_right, out_dtype=dtype, use_fast_accum=fast)


def emulates(device: torch.device) -> bool:
    """Whether products of blocks are emulated on ``device``: no CPU has such units."""
    return device.type != "cuda"


def _multiply_blocks(left: Quantized, right: Quantized, dtype: torch.dtype, fast: bool) -> Tensor:
    """On a CPU the operands are multiplied in a dtype that holds their values exactly, as in torchao's emulation.

    The scales of tensors are applied to the product in bfloat16. ``F.scaled_mm`` would take them, and the layout of the
    blocks' scales, but Inductor lowers it only with one plain scale for each operand.
    """
    if emulates(left.values.device):
        product = (dequantized(left) @ dequantized(right).t()).to(torch.bfloat16)
    else:
        scales = swizzled(left.scale.values, left.form), swizzled(right.scale.values, right.form)
        product = _scaled_mm(_gpu_values(left), _gpu_values(right), *scales, torch.bfloat16, False)
    if left.scale.outer is not None and right.scale.outer is not None:
        return (product * (left.scale.outer * right.scale.outer)).to(dtype)
    return product.to(dtype)


def _gpu_values(matrix: Quantized) -> Tensor:
    return matrix.values.view(_dtype(matrix.form))


def dequantized(matrix: Quantized) -> Tensor:
    """Return the values of a matrix in blocks: 8-bit ones in bfloat16; 4-bit ones in float32, without ``outer``."""
    if matrix.form.dtype == PACKED:
        scale = float4.decoded_scale(matrix.scale.values).unsqueeze(-1)
        return (_blocks(float4.unpacked(matrix.values), matrix.form) * scale).flatten(-2)
    exponent = matrix.scale.values.int()
    # Float32 has no normal value for exponent 0, and inf at 255.
    bits = torch.where(exponent == 0, 1 << 22, torch.where(exponent == 255, 0x7FC00000, exponent << 23))
    scale = bits.int().view(torch.float32).bfloat16().unsqueeze(-1)
    return (_blocks(matrix.values.bfloat16(), matrix.form) * scale).flatten(-2)


def swizzled(scale: Tensor, form: Quantization) -> Tensor:
    """Return the bytes of scales, ``[rows, blocks]``, in the order that Blackwell's tensor cores read, flat.

    Rows are padded to a multiple of 128, blocks to one of 4 (docs.nvidia.com/cuda/cublas, "1D Block Scaling Factors
    Layout").
    """
    rows, blocks = scale.shape
    padded = functional.pad(scale, (0, missing(blocks, TILE[1]), 0, missing(rows, TILE[0])))
    tiles = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    scale_dtype: torch.dtype = getattr(torch, form.scale_dtype)
    return tiles.reshape(-1).view(scale_dtype)


_PRODUCTS: Mapping[str | int, Callable[[Quantized, Quantized, torch.dtype, bool], Tensor]] = {
    TENSOR: _multiply_tensorwise,
    ROW: _multiply_rowwise,
}
