"""Values of 4 bits, two in a byte, and their scales in two levels: NVFP4, as torchao's ``NVFP4Tensor`` computes it.

A code is a sign, two bits of exponent and one of mantissa (e2m1): 0, 0.5, 1, 1.5, 2, 3, 4, 6. The first of a pair is in
the low half of its byte. A block's scale is float8_e4m3fn, relative to a float32 scale of the tensor with which the
largest block's is 448. Quotients are computed in float64, so that compilers and eager mode round them alike.

Stochastic rounding is unbiased, except for the largest value of a block whose scale was rounded down: it saturates at 6
times the scale, which is up to a sixteenth less, as in torchao and in the recipe's paper.

Random bits are a hash of the element's index and of a key that the device's default generator draws once for each
matrix, so ``torch.manual_seed`` makes them reproducible. Only gradients are rounded stochastically, in the backward, so
a checkpoint recomputes nothing random; a second backward of a graph (``retain_graph``) draws other bits. The lowerings
"eager" and "aot_eager" draw torch's numbers; Inductor draws its own, unless its ``fallback_random`` is set.
"""

import torch
from torch import Tensor

from fxamp.kernels.blockwise_8bit import mixed

LARGEST = 6.0
_LARGEST_SCALE, _LEAST_SCALE = 448.0, 2.0**-6
_LEAST_OUTER = 2.0**-121
"""The smallest scale of a tensor: with a smaller one the reciprocal of a block's scale could be infinite."""


def block_scales(largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales of blocks with these largest magnitudes, and the scale of the tensor, 0-dim float32.

    Decoded values are multiplied by both. A block's scale is a byte, in float8_e4m3fn. An infinite or NaN magnitude
    makes the tensor's scale NaN.
    """
    whole = largest.amax().double() / (_LARGEST_SCALE * LARGEST)
    outer = torch.where(whole < torch.inf, whole.clamp(min=_LEAST_OUTER), torch.nan).float()
    in_steps = (largest.double() / LARGEST).float()
    relative = (in_steps.double() / outer.double()).float().clamp(_LEAST_SCALE, _LARGEST_SCALE)
    return relative.to(torch.float8_e4m3fn).view(torch.uint8), outer


def factors(scale: Tensor, outer: Tensor) -> Tensor:
    """Return the float32 factor that the values of each block are multiplied by before they are rounded."""
    inverse = outer.double().reciprocal().float().double()
    return (inverse / decoded_scale(scale).double()).float()


def decoded_scale(scale: Tensor) -> Tensor:
    """Return the float32 values of float8_e4m3fn bytes."""
    return scale.view(torch.float8_e4m3fn).float()


def packed(values: Tensor, stochastic: bool) -> Tensor:
    """Return float32 ``[rows, 2n]`` as uint8 ``[rows, n]``; magnitudes above 6 become 6, ties go to even codes."""
    size = values.abs().clamp(max=LARGEST)
    small, middle = size < 2, size < 4
    steps = size * torch.where(small, 2.0, torch.where(middle, 1.0, 0.5))
    if stochastic:
        whole = steps.floor()
        whole = torch.where(_uniform(values) < steps - whole, whole + 1, whole)
    else:
        whole = steps.round()
    codes = whole + torch.where(small, 0.0, torch.where(middle, 2.0, 4.0))
    codes = torch.where(values.view(torch.int32) < 0, codes + 8, codes)
    # A sum, not two halves: Inductor would write the codes to memory if they had two users.
    of_pair = 1.0 + 15.0 * torch.arange(2, device=values.device)
    pairs: Tensor = codes.reshape(codes.shape[0], codes.shape[1] // 2, 2) * of_pair
    return pairs.sum(-1).to(torch.uint8).contiguous()


def unpacked(codes: Tensor) -> Tensor:
    """Return the float32 values, ``[rows, 2n]``, of uint8 ``[rows, n]``."""
    halves = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    size = (halves & 7).float()
    value = torch.where(size < 4, size * 0.5, torch.where(size < 6, size - 2, size * 2 - 8))
    return torch.where(halves > 7, -value, value)


def _uniform(like: Tensor) -> Tensor:
    """Random multiples of 2**-24 in [0, 1), float32, in the shape of the matrix ``like``."""
    key = torch.randint_like(like[:1, :1], -(1 << 31), 1 << 31, dtype=torch.int64).to(torch.int32)
    row, column = (torch.arange(size, dtype=torch.int32, device=like.device) for size in like.shape)
    bits = mixed((row.unsqueeze(1) * like.shape[1] + column) ^ key)
    return (bits >> 8 & 0xFFFFFF).float() * 2.0**-24
