"""Rows of groups: padded as torchao pads them, and scales in the order in which torchao writes them for GPUs."""

import pytest
import torch
from torch import Tensor

from fxamp.kernels.products import grouped_product, quantize
from fxamp.kernels.products.group_layout import padded
from fxamp.kernels.products.grouped_product import quantize_sums
from fxamp.policy import RECIPES, Recipe

layouts = pytest.importorskip(
    "torchao.prototype.moe_training.kernels.mxfp8.quant", reason="this torchao has no groups", exc_type=ImportError
)
utils = pytest.importorskip(
    "torchao.prototype.moe_training.utils", reason="this torchao has no groups", exc_type=ImportError
)

ENDS = ([77], [0, 40, 41, 77], [32, 64, 64, 76], [0, 0], [5, 5, 5, 5, 70], [64, 77, 77])


def offsets(ends: list[int]) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def rows(count: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("multiple", [16, 32])
def test_groups_are_padded_as_torchao_pads_them(ends: list[int], multiple: int) -> None:
    values = rows(77, 8)
    places = padded(offsets(ends), 77, multiple)
    expected, _, expected_ends = layouts.torch_pad_token_groups(values[: ends[-1]], offsets(ends), multiple)
    gathered = places.gather(values)
    assert torch.equal(places.ends, expected_ends) and gathered.shape[0] >= expected.shape[0]
    assert torch.equal(gathered[: expected.shape[0]], expected) and not gathered[expected.shape[0] :].any()
    assert ends[-1] < 77 or gathered.shape == expected.shape


@pytest.mark.parametrize("ends", ENDS)
def test_scales_of_rows_are_laid_out_as_torchao_lays_them_out(ends: list[int]) -> None:
    """For blocks of 160 values: a multiple of 4 of them are padded."""
    operand = quantize.quantize(rows(77, 128), RECIPES[Recipe.RCEIL].output[0])
    expected, _ = layouts.torch_to_blocked_2d_M_groups(operand.scale.values, offsets(ends))
    scale = grouped_product._row_scales(operand, offsets(ends)).view(torch.uint8)
    used = sum(-(-(end - start) // 128) * 128 for start, end in zip([0, *ends], ends, strict=False))
    assert torch.equal(scale[:used], expected[:used])


@pytest.mark.parametrize("columns", [64, 128, 160])
def test_scales_of_experts_are_laid_out_as_torchao_lays_them_out(columns: int) -> None:
    operand = quantize.quantize(rows(3 * columns, 96), RECIPES[Recipe.RCEIL].output[1])
    expected = layouts.torch_to_blocked_per_group_3d(operand.scale.values.view(3, columns, 3))
    assert torch.equal(grouped_product._expert_scales(operand, 3).view(torch.uint8), expected)


@pytest.mark.parametrize("ends", [*ENDS, [300, 310, 700]])
@pytest.mark.parametrize("columns", [64, 160])
def test_scales_of_sums_are_laid_out_as_torchao_lays_them_out(ends: list[int], columns: int) -> None:
    count = max(77, ends[-1])
    places = padded(offsets(ends), count, 32)
    operand = quantize_sums(rows(count, columns), places, RECIPES[Recipe.RCEIL].output[1])
    expected, _ = layouts.torch_to_blocked_2d_K_groups(operand.scale.values, places.ends // 32)
    scale = grouped_product._sum_scales(operand, places.ends).view(torch.uint8).flatten()
    blocks = [-(-(end - start) // 32) for start, end in zip([0, *ends], ends, strict=False)]
    used = -(-columns // 128) * 128 * sum(-(-count // 4) * 4 for count in blocks)
    assert torch.equal(scale[:used], expected.flatten()[:used])


@pytest.mark.parametrize("ends", ENDS)
def test_scales_of_rows_in_a_sum_are_torchaos(ends: list[int]) -> None:
    """One for each column and group, as its fp8 products take them for the weight's gradient."""
    form, values = RECIPES[Recipe.ROWWISE].output[0], rows(77, 48)
    places = padded(offsets(ends), 77, form.multiple)
    operand = quantize_sums(values, places, form)
    inside = places.sources >= 0
    assert not operand.values.t()[~inside].float().any()
    full = [i for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)) if end > start]
    if not full:
        return  # torchao takes no empty group
    groups = offsets([ends[i] for i in full])
    expected, scales = utils.torch_to_float8_per_group_colwise(values, groups, round_scales_to_power_of_2=True)
    assert torch.equal(operand.scale.values.t()[full].flatten(), scales)
    assert torch.equal(operand.values.t()[inside].view(torch.uint8), expected[: ends[-1]].view(torch.uint8))
