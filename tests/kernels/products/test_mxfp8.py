"""Products in MXFP8: torchao's values, scales, products and gradients, and what GPUs with such units receive."""

from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from support.machines.gpu_layouts import product_on_gpu, require_gpu_layouts
from support.oracles.mxfp8_beside import RECIPES, converted, linear_reference, quantized
from torch import Tensor, nn
from torchao.prototype.mx_formats.utils import from_blocked, to_blocked

from fxamp.kernels.products import quantize as module
from fxamp.kernels.products import scaled_linear
from fxamp.kernels.products.quantize import quantize, swizzled
from fxamp.policy import RECIPES as ROWS
from fxamp.policy import Recipe

DTYPES = (torch.bfloat16, torch.float32)


def form(recipe: str) -> Any:
    return ROWS[Recipe(recipe)].output[0]


def wide(*shape: int, seed: int = 0) -> Tensor:
    """Values over many powers of two."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp(6 * torch.randn(shape, generator=generator))


@pytest.mark.parametrize("recipe", ["floor", "rceil"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_scales_are_torchaos(recipe: str, dtype: torch.dtype) -> None:
    matrix = wide(256, 128).to(dtype)
    matrix[3], matrix[4, :32], matrix[5, 7] = 0, 448.0, torch.nan
    matrix[6, :32] = torch.tensor([449.0, *range(31)], dtype=dtype)  # above the largest of e4m3
    values, scale = quantized(matrix, recipe)
    own = quantize(matrix, form(recipe))
    assert torch.equal(own.scale.values, scale)
    sound = (scale != 255).repeat_interleave(32, 1)
    assert torch.equal(own.values.view(torch.uint8)[sound], values.view(torch.uint8)[sound])


@pytest.mark.parametrize("recipe", ["floor", "rceil"])
@pytest.mark.parametrize("size", [2.0**-133, 2.0**-119, 2.0**-60, 2.0**119])
def test_small_and_large_blocks_keep_their_values(recipe: str, size: float) -> None:
    matrix = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).clamp(-2, 2) * size
    own = quantize(matrix, form(recipe))
    scale = torch.exp2(own.scale.values.double() - 127).repeat_interleave(32, 1)
    error = (own.values.double() * scale - matrix.double()).abs()
    assert (error <= matrix.double().abs().amax() / 8).all()


@pytest.mark.parametrize("shape", [(128, 8), (48, 2), (200, 9), (1, 1)])
def test_scales_are_swizzled_as_torchao_swizzles_them(shape: tuple[int, int]) -> None:
    scale = torch.randint(255, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(swizzled(scale, form("rceil")).view(torch.uint8), to_blocked(scale))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(2, 16, 32), (96, 32)])
def test_layers_are_torchaos(recipe: str, shape: tuple[int, ...]) -> None:
    layer = nn.Linear(32, 64).bfloat16()
    theirs: Any = converted(nn.Sequential(layer), recipe)[0]
    x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(*shape[:-1], 64, dtype=torch.bfloat16)
    expected = theirs(x)
    wanted = torch.autograd.grad(expected, (x, theirs.weight, theirs.bias), gradient)
    own = scaled_linear(x, layer.weight, layer.bias, recipe, torch.bfloat16)
    gradients = torch.autograd.grad(own, (x, layer.weight, layer.bias), gradient)
    assert torch.equal(own, expected)
    assert_equal(gradients, wanted)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_any_number_of_rows_and_weights_in_float32(recipe: str, rows: int, dtype: torch.dtype) -> None:
    """Rows are padded with zeros where they are summed over; float32 weights are rounded once."""
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 64).to(dtype).requires_grad_(), torch.randn(96, 64, requires_grad=True)
    gradient = torch.randn(rows, 96).to(dtype)
    output = scaled_linear(x, weight, None, recipe, dtype)
    output.backward(gradient)
    if dtype is torch.float16 and recipe.endswith("_wgrad_with_hp"):
        expected = linear_reference(x.detach().float(), weight.detach(), gradient.float(), "rceil")[:2]
        assert weight.grad is not None and torch.equal(weight.grad, (gradient.t() @ x.detach()).float())
    else:
        operands = (x.detach(), gradient) if dtype is torch.bfloat16 else (x.detach().float(), gradient.float())
        expected = linear_reference(operands[0], weight.detach(), operands[1], recipe)
    for own, reference in zip((output, x.grad, weight.grad), expected, strict=False):
        assert own is not None and torch.equal(own, reference.to(own.dtype))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_so(recipe: str, bad: float) -> None:
    x, weight = torch.randn(32, 64).bfloat16().requires_grad_(), torch.randn(96, 64, requires_grad=True)
    spoilt, spoilt_weight = x.detach().clone(), weight.detach().clone()
    spoilt[3, 4] = spoilt_weight[3, 4] = bad
    assert scaled_linear(spoilt, weight, None, recipe, x.dtype)[3].isnan().all()
    assert scaled_linear(x, spoilt_weight, None, recipe, x.dtype)[:, 3].isnan().all()
    gradient = torch.randn(32, 96, dtype=torch.bfloat16)
    gradient[3, 4] = bad
    scaled_linear(x, weight, None, recipe, x.dtype).backward(gradient)
    assert x.grad is not None and x.grad[3].isnan().all()
    assert weight.grad is not None and not weight.grad[4].isfinite().any()


def _by_definition(left: Tensor, right: Tensor, **settings: Any) -> Tensor:
    """``torch._scaled_mm`` of blocks, after torch's meta kernel accepted these layouts for a GPU."""
    require_gpu_layouts(_SCALED_MM, (left, right), settings)
    values = []
    for matrix, scale in ((left, settings["scale_a"]), (right.t(), settings["scale_b"])):
        biased = from_blocked(scale.view(torch.uint8), matrix.shape[0], matrix.shape[1] // 32)
        values.append(matrix.double() * torch.exp2(biased.double() - 127).repeat_interleave(32, 1))
    assert settings["out_dtype"] is torch.bfloat16
    return (values[0] @ values[1].t()).bfloat16()


_SCALED_MM = torch._scaled_mm


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [1, 33, 160])
def test_gpus_receive_the_same_products(recipe: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(rows, 64).bfloat16().requires_grad_(), torch.randn(96, 64, requires_grad=True)
    gradient = torch.randn(rows, 96).bfloat16()
    emulated = scaled_linear(x, weight, None, recipe, torch.bfloat16)
    expected = torch.autograd.grad(emulated, (x, weight), gradient)
    monkeypatch.setattr(module, "emulates", lambda device: False)
    monkeypatch.setattr(torch, "_scaled_mm", _by_definition)
    output = scaled_linear(x, weight, None, recipe, torch.bfloat16)
    gradients = torch.autograd.grad(output, (x, weight), gradient)
    for own, reference in zip((output, *gradients), (emulated, *expected), strict=True):
        torch.testing.assert_close(own, reference, rtol=2**-7, atol=2**-7 * float(reference.detach().abs().max()))


def test_a_gpus_graph_multiplies_blocks() -> None:
    assert product_on_gpu("rceil").args[0].meta["val"].dtype is torch.float8_e4m3fn
