"""Values of 4 bits: torchao's codes and scales, stochastic rounding, and the Hadamard transform."""

from typing import Any

import pytest
import torch
from support.oracles.nvfp4_beside import hadamard, of_tiles, quantized, spread
from torch import Tensor
from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, f32_to_f4_unpacked, pack_uint4, unpack_uint4

from fxamp.kernels.products.float4 import packed, unpacked
from fxamp.kernels.products.hadamard import hadamard_matrix, transformed
from fxamp.kernels.products.quantize import Quantized, prepared, quantize, swizzled
from fxamp.policy import RECIPES, Recipe

PRODUCTS = RECIPES[Recipe.PRETRAINING]
NEAREST, SQUARE = PRODUCTS.output
CHANCE, NEAREST_RHT = PRODUCTS.input_gradient[0], RECIPES[Recipe.PRETRAINING_WITHOUT_SR].weight_gradient[1]  # type: ignore[index]
LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def wide(*shape: int, seed: int = 0) -> Tensor:
    """Values over many powers of two."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))


def values_of(matrix: Quantized) -> Tensor:
    """The values of a quantized matrix, float64."""
    scale = matrix.scale.values.view(torch.float8_e4m3fn).double().repeat_interleave(16, 1)
    assert matrix.scale.outer is not None
    return unpacked(matrix.values).double() * scale * matrix.scale.outer.double()


def test_codes_are_torchaos() -> None:
    """At all levels, at all ties between them, and beside both."""
    ties = (LEVELS[1:] + LEVELS[:-1]) / 2
    points = torch.cat((LEVELS, ties, torch.tensor([7.0, 1e30])))
    near = torch.cat((points, points.nextafter(torch.tensor(0.0)), points.nextafter(torch.tensor(torch.inf))))
    values = torch.cat((near, -near, torch.rand(4096, generator=torch.Generator().manual_seed(0)) * 7))
    values = torch.cat((values, values[: values.numel() % 2])).reshape(1, -1)
    expected = f32_to_f4_unpacked(values)
    assert torch.equal(packed(values, stochastic=False), pack_uint4(expected))
    assert torch.equal(unpacked(pack_uint4(expected)), f4_unpacked_to_f32(expected))
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, -1)
    assert torch.equal(unpacked(codes), f4_unpacked_to_f32(unpack_uint4(codes)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [2.0**-60, 1.0, 2.0**60])
def test_values_and_scales_are_torchaos(dtype: torch.dtype, size: float) -> None:
    matrix = (wide(64, 128) * size).to(dtype)
    matrix[3], matrix[4, :16] = 0, matrix.abs().max()
    matrix[5] *= 1e-8  # blocks whose scale is the least of e4m3
    values, scale, outer = quantized(matrix)
    own = quantize(matrix, NEAREST)
    assert own.scale.outer is not None and torch.equal(own.scale.outer, outer)
    assert torch.equal(own.scale.values, scale) and torch.equal(own.values, values)


def test_tiles_share_a_scale() -> None:
    """So a weight and its transpose have the same values, whichever a product sums over."""
    weight = wide(64, 96).bfloat16()
    own, flipped = values_of(quantize(weight, SQUARE)), values_of(quantize(weight.t(), SQUARE))
    assert torch.equal(own, flipped.t())
    torch.testing.assert_close(own.float(), of_tiles(weight), rtol=2**-22, atol=0)  # one product is rounded
    rows = [values_of(quantize(matrix, NEAREST)) for matrix in (weight, weight.t())]
    assert not torch.equal(rows[0], rows[1].t())


def test_zeros_and_tiny_values_have_finite_results() -> None:
    for size in (0.0, 2.0**-149, 2.0**-133, 2.0**-120):
        matrix = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).clamp(-2, 2) * size
        error = (values_of(quantize(matrix, NEAREST)) - matrix.double()).abs()
        assert (error <= max(matrix.double().abs().amax() / 5, 2.0**-129)).all()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_makes_the_tensors_scale_nan(bad: float) -> None:
    matrix = torch.ones(32, 64)
    matrix[3, 4] = bad
    scale = quantize(matrix, NEAREST).scale
    assert scale.outer is not None and scale.outer.isnan()


def test_scales_are_swizzled_as_bytes_of_e4m3() -> None:
    from torchao.prototype.mx_formats.utils import to_blocked

    scale = quantize(wide(48, 96), NEAREST).scale.values
    own = swizzled(scale, NEAREST)
    assert own.dtype is torch.float8_e4m3fn and torch.equal(own.view(torch.uint8), to_blocked(scale))


def test_the_hadamard_matrix_is_torchaos_and_orthogonal() -> None:
    own = hadamard_matrix(torch.device("cpu"), torch.float64)
    assert torch.equal(own @ own.t(), torch.eye(16, dtype=torch.float64))
    assert torch.equal(own, hadamard(torch.float64))


def test_transformed_operands_have_the_plain_product() -> None:
    """In float64 but for the rounding of each operand to bfloat16."""
    left, right = (torch.randint(-8, 9, (8, 64), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    own = [transformed(matrix.double()).double() for matrix in (left, right)]  # small integers stay exact
    assert torch.equal(own[0] @ own[1].t(), left.double() @ right.double().t())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_what_is_transformed_is_torchaos(dtype: torch.dtype) -> None:
    gradient = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(prepared(gradient.t(), NEAREST_RHT), spread(gradient.t()))
    values, scale, outer = quantized(spread(gradient.t()))
    own = quantize(gradient.t(), NEAREST_RHT)
    assert own.scale.outer is not None and torch.equal(own.scale.outer, outer)
    assert torch.equal(own.scale.values, scale) and torch.equal(own.values, values)


def neighbours(value: Tensor) -> tuple[Tensor, Tensor]:
    """The largest level below or at magnitudes up to 6, and the next one."""
    at = (torch.bucketize(value.abs(), LEVELS, right=True) - 1).clamp(max=6)
    return LEVELS[at], LEVELS[at + 1]


def test_stochastic_rounding_is_unbiased() -> None:
    """Means over 1024 draws are within six standard deviations; rounding to nearest is not."""
    generator = torch.Generator().manual_seed(0)
    values = (torch.rand(1, 512, generator=generator) * 12 - 6).clamp(-6, 6)
    values[0, :16] = torch.cat((LEVELS, -LEVELS))
    low, high = neighbours(values)
    chance = (values.abs() - low) / (high - low)
    allowed = 6 * (high - low) * (chance * (1 - chance) / 1024).sqrt() + 1e-6
    torch.manual_seed(0)
    draws = torch.cat([unpacked(packed(values, stochastic=True)) for _ in range(1024)])
    assert ((draws.mean(0) - values).abs() <= allowed).all()
    assert ((draws.abs() == low) | (draws.abs() == high)).all() and (draws * values >= 0).all()
    assert (draws[:, :16] == values[:, :16]).all()
    rounded = unpacked(packed(values, stochastic=False))
    assert not ((rounded - values).abs() <= allowed).all()


def test_random_bits_follow_the_seed_and_differ_by_element_and_draw() -> None:
    values = torch.full((64, 64), 0.25)

    def drawn(seed: int | None) -> Tensor:
        if seed is not None:
            torch.manual_seed(seed)
        return unpacked(packed(values, stochastic=True)) > 0

    first, second, again = drawn(0), drawn(None), drawn(0)
    assert torch.equal(first, again) and not torch.equal(first, second)
    # Of independent bits, 4096 agree with 4096 others in a half, with a standard deviation of 1/128.
    for other in (second, first.roll(1, 0), first.roll(1, 1), first.roll(16, 0), first.t()):
        assert abs(float((first == other).float().mean()) - 0.5) < 6 / 128


@pytest.mark.parametrize("rows", [1, 7, 33])
def test_sums_over_rows_are_padded(rows: int) -> None:
    gradient: Any = torch.randn(rows, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    for form in (CHANCE, NEAREST_RHT):
        own = quantize(gradient.t(), form)
        assert own.values.shape == (48, 16 * -(-rows // 32)) and own.scale.values.shape == (48, 2 * -(-rows // 32))
