"""Layers in NVFP4: torchao's values multiplied, errors that the format explains, and what GPUs receive."""

import math
from typing import Any

import pytest
import torch
from support.machines.gpu_layouts import product_on_gpu, require_gpu_layouts
from support.oracles.nvfp4_beside import RECIPES, dequantized, of_tiles, quantized, spread
from torch import Tensor
from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4
from torchao.prototype.mx_formats.utils import from_blocked

from fxamp.kernels.products import quantize as module
from fxamp.kernels.products import scaled_linear
from fxamp.policy import RECIPES as ROWS
from fxamp.policy import Recipe

CERTAIN = ("pretraining_without_sr", "nearest")


def operands(rows: int, inner: int = 64, columns: int = 96, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Input, weight and the output's gradient."""
    generator = torch.Generator().manual_seed(rows)
    x, weight, gradient = (
        torch.randn(size, generator=generator) for size in ((rows, inner), (columns, inner), (rows, columns))
    )
    return [x.to(dtype).requires_grad_(), weight.requires_grad_(), gradient.to(dtype)]


def products(recipe: str, x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    output = scaled_linear(x, weight, None, recipe, gradient.dtype)
    return (output.detach(), *torch.autograd.grad(output, (x, weight), gradient))


def by_torchao(recipe: str, x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """The products of what torchao dequantizes, float64; of recipes that round to nearest."""
    x, weight = x.detach(), weight.detach()
    tiles, turned = recipe != "nearest", recipe == "pretraining_without_sr"
    of_output, of_input = (of_tiles(weight) if tiles else dequantized(w) for w in (weight, weight.t()))
    of_input = of_input if tiles else of_input.t()
    over_rows = []
    for matrix in (gradient, x):
        whole = torch.nn.functional.pad(matrix.float().t(), (0, -matrix.shape[0] % 32))
        over_rows.append(dequantized(spread(whole) if turned else whole).double())
    return (
        dequantized(x.float()).double() @ of_output.double().t(),
        dequantized(gradient.float()).double() @ of_input.double(),
        over_rows[0] @ over_rows[1].t(),
    )


@pytest.mark.parametrize("recipe", CERTAIN)
@pytest.mark.parametrize("rows", [1, 33, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_those_of_torchaos_values(recipe: str, rows: int, dtype: torch.dtype) -> None:
    """Rounded to bfloat16 twice, before and after the scales of the tensors."""
    tensors = operands(rows, dtype=dtype)
    for own, exact in zip(products(recipe, *tensors), by_torchao(recipe, *tensors), strict=True):
        torch.testing.assert_close(own.double(), exact, rtol=2**-7, atol=2**-16 * float(exact.abs().max()))


def test_dtypes_and_shapes_are_those_of_the_operands() -> None:
    x, weight, gradient = operands(24)
    x = x.detach().reshape(2, 12, 64).requires_grad_()
    output = scaled_linear(x, weight, torch.ones(96), "pretraining", torch.bfloat16)
    output.backward(gradient.reshape(2, 12, 96))
    assert output.shape == (2, 12, 96) and output.dtype is torch.bfloat16
    assert x.grad is not None and (x.grad.shape, x.grad.dtype) == (x.shape, torch.bfloat16)
    assert weight.grad is not None and (weight.grad.shape, weight.grad.dtype) == (weight.shape, torch.float32)


def noise(matrix: Tensor, rows: int, stochastic: bool) -> float:
    """The power of the rounding error that the format's steps explain, relative to that of the values.

    A step of s rounds to nearest with a variance of s**2 / 12, stochastically with twice that.
    """
    tiles = matrix.double().reshape(matrix.shape[0] // rows, rows, -1, 16)
    scaled = tiles.abs() * 6 / tiles.abs().amax((1, 3), keepdim=True)
    step = torch.where(scaled < 2, 0.5, torch.where(scaled < 4, 1.0, 2.0))
    of_scaled = (step**2 / (6 if stochastic else 12)) * (tiles.abs().amax((1, 3), keepdim=True) / 6) ** 2
    return float(of_scaled.sum() / tiles.square().sum())


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_noise_is_what_the_steps_explain(recipe: str) -> None:
    """Compared with float64; at least 15 decibels below products of normal values.

    A scale is rounded by up to a sixteenth, and with it the steps: half a decibel of each operand; where it is rounded
    down, the largest value of its block is cut by as much.
    """
    tensors = operands(256, 256, 256)
    x, weight, gradient = (tensor.detach().double() for tensor in tensors)
    exact = x @ weight.t(), gradient @ weight, gradient.t() @ x
    forms, of_operands = ROWS[Recipe(recipe)], ((x, weight), (gradient, weight), (gradient, x))
    torch.manual_seed(0)
    for own, reference, form, pair in zip(products(recipe, *tensors), exact, forms, of_operands, strict=True):
        assert form is not None
        explained = sum(noise(m, f.rows, f.stochastic) for m, f in zip(pair, form, strict=True))
        measured = float((own.double() - reference).square().sum() / reference.square().sum())
        assert abs(10 * math.log10(measured / explained)) < 1.5 and measured < 10**-1.5


def test_the_mean_of_gradients_rounded_stochastically_is_that_of_exact_ones() -> None:
    """Over 256 draws, compared with the weight's rounded values; but what a block's rounded scale cuts off is lost.

    Rounding to nearest has a lasting error.
    """
    x, weight, gradient = operands(32, 32, 32)
    torch.manual_seed(0)
    draws = [products("pretraining_without_rht", x, weight, gradient)[1].double() for _ in range(256)]
    _, scale, outer = quantized(gradient)
    limit = 6 * scale.view(torch.float8_e4m3fn).double().repeat_interleave(16, 1) * outer.double()
    exact = gradient.double().clamp(-limit, limit) @ of_tiles(weight.detach()).double()
    spread_of_mean = torch.stack(draws).std(0) / 16
    rounding = 2**-8 * exact.abs()  # bfloat16's, of every draw
    assert ((torch.stack(draws).mean(0) - exact).abs() <= 6 * spread_of_mean + rounding).all()
    lasting = products("pretraining_without_sr", x, weight, gradient)[1].double()
    assert not ((lasting - exact).abs() <= 6 * spread_of_mean + rounding).all()


def test_a_transform_keeps_what_outliers_hide() -> None:
    """Ones next to values of 40 are rounded to zero in each block, so their sum is lost: not after the transform."""
    generator = torch.Generator().manual_seed(0)
    x = torch.ones(1024, 32)
    x[::16] = 40 * torch.randint(0, 2, (64, 32), generator=generator) * 2.0 - 40
    gradient = torch.ones(1024, 32) + 0.1 * torch.randn(1024, 32, generator=generator)
    exact = gradient.double().t() @ x.double()
    torch.manual_seed(0)
    errors = []
    for recipe in ("pretraining", "pretraining_without_rht"):
        weight = torch.ones(32, 32, requires_grad=True)
        scaled_linear(x.bfloat16(), weight, None, recipe, torch.bfloat16).backward(gradient.bfloat16())
        assert weight.grad is not None
        errors.append(float((weight.grad.double() - exact).norm() / exact.norm()))
    assert errors[0] < errors[1] / 2


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_so(recipe: str, bad: float) -> None:
    """The scale of the tensor is NaN, and with it all results."""
    x, weight, gradient = operands(32)
    for at in range(3):
        tensors = [tensor.detach().clone() for tensor in (x, weight, gradient)]
        tensors[at][3, 4] = bad
        results = products(recipe, tensors[0].requires_grad_(), tensors[1].requires_grad_(), tensors[2])
        for result, read in zip(results, ((0, 1), (2, 1), (2, 0)), strict=True):
            assert bool(result.isnan().all()) == (at in read)


@pytest.mark.parametrize("recipe", RECIPES)
def test_zeros_give_zeros(recipe: str) -> None:
    x, weight, gradient = operands(32)
    zeros = torch.zeros_like(x).requires_grad_()
    output, of_input, of_weight = products(recipe, zeros, weight, gradient)
    assert not output.any() and not of_weight.any() and of_input.isfinite().all()
    _, of_input, of_weight = products(recipe, x, weight, torch.zeros_like(gradient))
    assert not of_input.any() and not of_weight.any()


def test_a_seed_decides_gradients_and_nothing_else() -> None:
    tensors = operands(32)

    def seeded(seed: int) -> tuple[Tensor, ...]:
        torch.manual_seed(seed)
        return products("pretraining", *tensors)

    first, again, other = seeded(0), seeded(0), seeded(1)
    assert all(map(torch.equal, first, again)) and torch.equal(first[0], other[0])
    assert not torch.equal(first[1], other[1]) and not torch.equal(first[2], other[2])


def _by_definition(left: Tensor, right: Tensor, **settings: Any) -> Tensor:
    """``torch._scaled_mm`` of blocks of 16, after torch's meta kernel accepted these layouts for a GPU."""
    require_gpu_layouts(_SCALED_MM, (left, right), settings)
    values = []
    for matrix, scale in ((left, settings["scale_a"]), (right.t(), settings["scale_b"])):
        codes = unpack_uint4(matrix.contiguous().view(torch.uint8))
        blocks = from_blocked(scale.view(torch.uint8), codes.shape[0], codes.shape[1] // 16)
        factor = blocks.view(torch.float8_e4m3fn).double().repeat_interleave(16, 1)
        values.append(f4_unpacked_to_f32(codes).double() * factor)
    assert settings["out_dtype"] is torch.bfloat16
    return (values[0] @ values[1].t()).bfloat16()


_SCALED_MM = torch._scaled_mm


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [1, 33, 160])
def test_gpus_receive_the_same_products(recipe: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = operands(rows)
    torch.manual_seed(0)
    emulated = products(recipe, *tensors)
    monkeypatch.setattr(module, "emulates", lambda device: False)
    monkeypatch.setattr(torch, "_scaled_mm", _by_definition)
    torch.manual_seed(0)
    for own, reference in zip(products(recipe, *tensors), emulated, strict=True):
        torch.testing.assert_close(own, reference, rtol=2**-7, atol=2**-16 * float(reference.abs().max()))


def test_a_gpus_graph_multiplies_packed_values() -> None:
    assert product_on_gpu("pretraining").args[0].meta["val"].dtype is torch.float4_e2m1fn_x2
