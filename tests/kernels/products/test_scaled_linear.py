"""The scaled linear layer: torchao's numbers, layouts that GPUs accept, and values at the edges."""

import math
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from support.machines.gpu_layouts import GpuLayouts
from support.machines.lacks import needs_rowwise_products
from support.oracles.torchao_beside import FNUZ, MULTIPLIED, RECIPES, converted, float8, multiplied
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from fxamp.errors import MachineError
from fxamp.kernels.products import scaled_linear as product
from fxamp.kernels.products.quantize import quantize, scale_of
from fxamp.policy import RECIPES as PRODUCTS
from fxamp.policy import ROW, TENSOR, Quantization, Recipe

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E4M3_FNUZ, E5M2_FNUZ = torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
DTYPES = (torch.bfloat16, torch.float16)


def scaled(
    x: Tensor, weight: Tensor, recipe: str, dtype: torch.dtype = torch.bfloat16, bias: Tensor | None = None
) -> Tensor:
    return product(x, weight, bias, recipe, dtype)


def leaves(rows: int, inner: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + columns)
    x, weight = torch.randn(rows, inner, generator=generator), torch.randn(columns, inner, generator=generator)
    return x.to(dtype).requires_grad_(), (weight / inner**0.5).requires_grad_()


def error(value: Tensor | None, exact: Tensor) -> float:
    assert value is not None
    return float((value.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("recipe", MULTIPLIED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 16, 32), (48, 32)])
def test_torchao_computes_the_same(recipe: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    theirs = converted(nn.Sequential(nn.Linear(32, 48).to(dtype)), recipe)
    x, gradient = torch.randn(shape, dtype=dtype, requires_grad=True), torch.randn(*shape[:-1], 48, dtype=dtype)
    layer: Any = theirs[0]
    expected = theirs(x)
    wanted_gradients = torch.autograd.grad(expected, (x, layer.weight, layer.bias), gradient)
    got = scaled(x, layer.weight, recipe, dtype, layer.bias)
    gradients = torch.autograd.grad(got, (x, layer.weight, layer.bias), gradient)
    assert torch.equal(got, expected) and got.dtype is dtype
    assert_equal(gradients, wanted_gradients)


@pytest.mark.parametrize("recipe", FNUZ)
def test_fnuz_values_and_scales_are_torchaos(recipe: str) -> None:
    """Powers of two as scales give products that do not tell 240 from 448 as the largest value."""
    matrix = torch.randn(48, 32, generator=torch.Generator().manual_seed(0))
    matrix[3, 4], matrix[5], matrix[6, 0], matrix[7] = -torch.inf, 0, -1e-30, 1e-3
    matrix[8] = torch.linspace(-248, 248, 32)
    forms = {form for operands in PRODUCTS[Recipe(recipe)] for form in operands or ()}
    assert {form.dtype for form in forms} <= {"float8_e4m3fnuz", "float8_e5m2fnuz"}
    for form in forms:
        whole = matrix.nan_to_num(neginf=-300.0) if form.block == TENSOR else matrix
        dtype, rows = getattr(torch, form.dtype), float8.config.ScalingGranularity.AXISWISE
        granularity = {} if form.block == TENSOR else {"scaling_granularity": rows, "axiswise_dim": -1}
        granularity["round_scales_to_power_of_2"] = bool(form.scale_rounding)
        scale = float8.float8_utils.tensor_to_scale(whole, dtype, **granularity)
        own = quantize(whole, form)
        assert torch.equal(own.scale.values, scale)
        expected = float8.float8_utils.to_fp8_saturated(whole * scale, dtype)
        assert torch.equal(own.values.view(torch.uint8), expected.view(torch.uint8))
        assert own.values.view(torch.uint8)[5:7, 0].tolist() == [0, 0]  # there is no negative zero: 0x80 is NaN


def column_major(value: Tensor) -> Tensor:
    return value.detach().t().contiguous().t().requires_grad_()


@pytest.mark.parametrize("recipe", multiplied(*RECIPES))
@pytest.mark.parametrize("rows", [1, 7, 16, 33])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpus_accept_every_layout(recipe: str, rows: int, dtype: torch.dtype) -> None:
    x, weight = leaves(rows, 32, 48, dtype)
    gradient = torch.ones(rows, 48, dtype=dtype)
    with GpuLayouts() as gpu:
        for operands in ((x, weight), (column_major(x), weight), (x, column_major(weight))):
            for incoming in (gradient, column_major(gradient).detach()):
                scaled(*operands, recipe, dtype).backward(incoming)
    assert gpu.products == 6 * (2 if recipe == "rowwise_with_gw_hp" else 3)


def test_the_check_of_layouts_refuses() -> None:
    e4m3, one = torch.zeros(16, 16).to(torch.float8_e4m3fn), torch.ones(())
    with GpuLayouts(), pytest.raises(RuntimeError, match="col_major"):
        torch._scaled_mm(e4m3, e4m3, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("recipe", MULTIPLIED)
@pytest.mark.parametrize("rows", [1, 7, 33])
def test_any_number_of_rows_has_gradients(recipe: str, rows: int) -> None:
    x, weight = leaves(rows, 64, 48)
    gradient = torch.randn(rows, 48)
    scaled(x, weight, recipe).backward(gradient.bfloat16())
    assert error(x.grad, gradient.double() @ weight.detach().double()) < 0.08
    assert error(weight.grad, gradient.double().t() @ x.detach().double()) < 0.08
    assert x.grad is not None and weight.grad is not None
    assert x.grad.dtype is torch.bfloat16 and weight.grad.dtype is torch.float32


@pytest.mark.parametrize("recipe", MULTIPLIED)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_so(recipe: str, bad: float) -> None:
    x, weight = leaves(16, 32, 48)
    spoilt = x.detach().clone()
    spoilt[3, 4] = bad
    assert not scaled(spoilt, weight, recipe)[3].isfinite().any()
    spoilt = weight.detach().clone()
    spoilt[3, 4] = bad
    assert not scaled(x, spoilt, recipe)[:, 3].isfinite().any()
    gradient = torch.randn(16, 48, dtype=torch.bfloat16)
    gradient[3, 4] = bad
    scaled(x, weight, recipe).backward(gradient)
    assert x.grad is not None and not x.grad[3].isfinite().any()
    assert weight.grad is not None and not weight.grad[4].isfinite().any()


@pytest.mark.parametrize("recipe", MULTIPLIED)
def test_zeros_give_zeros(recipe: str) -> None:
    x, weight = leaves(16, 32, 48)
    with torch.no_grad():
        x[2], weight[5] = 0, 0
    product = scaled(x, weight, recipe)
    gradient = torch.randn(16, 48, dtype=torch.bfloat16)
    gradient[7] = 0
    product.backward(gradient)
    assert x.grad is not None and weight.grad is not None
    assert not product[2].any() and not product[:, 5].any() and not x.grad[7].any()
    assert all(value.isfinite().all() for value in (product, x.grad, weight.grad))
    nothing = torch.zeros(16, 32, dtype=torch.bfloat16, requires_grad=True)
    scaled(nothing, torch.zeros(48, 32), recipe).backward(torch.zeros(16, 48, dtype=torch.bfloat16))
    assert nothing.grad is not None and not nothing.grad.any()


@pytest.mark.parametrize("recipe", multiplied(*RECIPES))
@pytest.mark.parametrize("size", [2.0**-120, 2.0**-20, 1.0, 2.0**100])
def test_scales_follow_the_size_of_the_values(recipe: str, size: float) -> None:
    """A power of two changes no digit, until the scaled value is too small to differ from zero."""
    x, weight = leaves(16, 32, 48)
    product, same = scaled(x * size, weight, recipe), scaled(x, weight, recipe)
    assert torch.equal(product, same * size) or (size < 1e-30 and not product.isnan().any())


@needs_rowwise_products
def test_gradients_are_made_for_what_needs_them_alone() -> None:
    x, weight = leaves(16, 32, 48)
    scaled(x.detach(), weight, "rowwise").sum().backward()
    assert weight.grad is not None
    scaled(x, weight.detach(), "rowwise").sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("recipe", ["tensorwise", "rceil", "pretraining"])
def test_a_second_derivative_is_refused(recipe: str) -> None:
    x, weight = leaves(16, 32, 64)
    (first,) = torch.autograd.grad(scaled(x, weight, recipe).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        first.sum().backward()


@pytest.mark.parametrize("recipe", multiplied(*RECIPES))
def test_no_copies_of_weights_in_8_bits_are_kept(recipe: str) -> None:
    x, weight = leaves(16, 32, 48)
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    def program(x: Tensor, weight: Tensor) -> Tensor:
        return scaled(x.exp(), weight, recipe).float().square().sum()

    compiled = aot_function(program, keep, keep, partition_fn=min_cut_rematerialization_partition)
    compiled(x, weight).backward()
    (output,) = graphs[0].graph.find_nodes(op="output")
    values = [node.meta["val"] for node in output.args[0][1:]]
    assert (torch.float32, (48, 32)) in [(value.dtype, tuple(value.shape)) for value in values]
    assert not [value for value in values if value.numel() == 48 * 32 and value.dtype is not torch.float32]
    expected = [value.grad for value in (x, weight)]
    x.grad = weight.grad = None
    program(x, weight).backward()
    assert all(torch.equal(got, value.grad) for got, value in zip(expected, (x, weight), strict=True))


@pytest.mark.parametrize("dtype", [E4M3, E5M2, E4M3_FNUZ, E5M2_FNUZ])
def test_the_largest_value_is_rounded_to_the_largest_of_the_dtype(dtype: torch.dtype) -> None:
    """Casts need not saturate, as those of torch 2.11 do not: no value is scaled beyond what rounds back."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4096, generator=generator) * torch.exp(20 * torch.randn(4096, generator=generator))
    for value in (values, values.bfloat16(), values.bfloat16() * (1 + 2**-7)):  # the last: a cast before rounding
        matrix = value.reshape(-1, 1)
        scale = scale_of(matrix.bfloat16(), Quantization(str(dtype).removeprefix("torch."), ROW)).values
        scaled = (matrix.float() * scale)[matrix[:, 0].abs() > 1e-11].abs()
        limit = torch.finfo(dtype).max
        midpoint = {E4M3: 464.0, E4M3_FNUZ: 248.0}.get(dtype, 61440.0)  # from here on a cast gives NaN or inf
        assert (scaled > 0.98 * limit).all() and (scaled < midpoint).all()


def ratio(exact: Tensor, value: Tensor | None) -> float:
    """Of signal to noise, in decibels."""
    return -20 * math.log10(error(value, exact))


@pytest.mark.parametrize("recipe", multiplied(*RECIPES))
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_noise_is_below_the_limits_of_torchaos_own_tests(recipe: str, dtype: torch.dtype) -> None:
    """At least 18 decibels of the output, and 17 of the weight's gradient (torchao, test/float8/test_base.py)."""
    x, weight = leaves(64, 256, 128, dtype)
    product = scaled(x, weight, recipe, dtype)
    gradient = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    product.backward(gradient)
    wide, exact = x.detach().double(), gradient.double()
    assert ratio(wide @ weight.detach().double().t(), product.detach()) >= 18
    assert ratio(exact.t() @ wide, weight.grad) >= 17
    assert ratio(exact @ weight.detach().double(), x.grad) >= 17


def test_a_torch_without_products_by_rows_on_cpus_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.11.0"))
    with pytest.raises(MachineError, match=r"torch 2\.11\.0 multiplies .* only on GPUs"):
        scaled(*leaves(16, 32, 48), "rowwise")
