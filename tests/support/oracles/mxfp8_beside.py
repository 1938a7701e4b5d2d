"""Linear layers in MXFP8 as torchao emulates them: its quantization, its products and its gradients."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

mx_tensor = pytest.importorskip(
    "torchao.prototype.mx_formats.mx_tensor", reason="this torchao has no MX formats", exc_type=ImportError
)
mxfp8_linear = pytest.importorskip(
    "torchao.prototype.moe_training.mxfp8_linear", reason="this torchao does not train in MXFP8", exc_type=ImportError
)
from torchao.prototype.mx_formats.config import ScaleCalculationMode  # noqa: E402 (after the check that it is there)
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference  # noqa: E402

RECIPES = ("floor", "rceil", "rceil_wgrad_with_hp")


def mode(recipe: str) -> ScaleCalculationMode:
    """How torchao names the rounding of the recipe's scales."""
    return ScaleCalculationMode[recipe.partition("_")[0].upper()]


class EmulatedLinear(nn.Linear):
    """A linear layer under autocast to bfloat16 with torchao's products; its weights are rounded to bfloat16 first."""

    recipe: str

    def forward(self, input: Tensor) -> Tensor:
        product: Tensor = mxfp8_linear._to_mxfp8_then_scaled_mm(
            input.bfloat16(),
            self.weight.bfloat16().contiguous(),
            kernel_preference=KernelPreference.EMULATED,
            scale_calculation_mode=mode(self.recipe),
            wgrad_with_hp=self.recipe.endswith("_wgrad_with_hp"),
        )
        return product if self.bias is None else product + self.bias.to(product.dtype)


def converted(model: nn.Module, recipe: str) -> nn.Module:
    """A copy of ``model`` whose linear layers are torchao's."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(module, nn.Linear):
            module.__class__ = EmulatedLinear
            module.recipe = recipe
    return twin


def quantized(matrix: Tensor, recipe: str) -> tuple[Tensor, Tensor]:
    """8-bit values and biased exponents of a contiguous matrix, in blocks along its rows."""
    scale, values = mx_tensor.to_mx(matrix, torch.float8_e4m3fn, 32, mode(recipe))
    return values, scale.view(torch.uint8)


def linear_reference(x: Tensor, weight: Tensor, gradient: Tensor, recipe: str) -> tuple[Tensor, Tensor, Tensor]:
    """The output and the gradients of input and weight, for weights that are quantized from float32."""
    rows = -x.shape[0] % 32

    def value(matrix: Tensor) -> Tensor:
        whole = mx_tensor.MXTensor.to_mx(matrix.contiguous(), torch.float8_e4m3fn, 32, mode(recipe))
        dequantized: Tensor = whole.dequantize(torch.bfloat16)
        return dequantized

    def over_rows(matrix: Tensor) -> Tensor:
        return value(F.pad(matrix.t(), (0, rows)))

    output = value(x) @ value(weight).t()
    of_input = value(gradient) @ value(weight.t()).t()
    exact = recipe.endswith("_wgrad_with_hp")
    of_weight = gradient.t() @ x if exact else over_rows(gradient) @ over_rows(x).t()
    return output, of_input.to(x.dtype), of_weight.to(weight.dtype)
