"""The squared norm against a float64 sum, within a bound that is derived from how it is summed."""

import pytest
import torch
from kernel_cases import finite_bits

from fxamp.kernels import check_, check_unscale_, check_unscale_norm
from fxamp.kernels.dispatch import perform
from fxamp.kernels.gradient_request import UnscaleRequest
from fxamp.kernels.launch_plan import CHUNK, block_size

pytestmark = pytest.mark.usefixtures("implementation")

UNIT = 2.0**-24  # float32's unit roundoff


def bound(numels: list[int]) -> float:
    """Return the largest relative error of the sum, since all terms are positive: (1 + u) ** roundings - 1.

    Roundings on the way of one element: its product with 1 / scale, twice since it is squared; its square; one addition
    a block of its chunk; at most one addition an element of a block, in whatever order they are reduced (Higham,
    Accuracy and Stability of Numerical Algorithms, 4.2); one a program; and the last, into the result.
    """
    block = block_size(torch.float32, 32)
    programs = sum(-(-numel // CHUNK) for numel in numels)
    return float((1 + UNIT) ** (2 + 1 + CHUNK // block + block + programs + 1) - 1)


def gradients_like_real_ones() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(3, 7), (40_000,), (2048,), (1,), (16_383,)]
    dtypes = [torch.float16, torch.float32, torch.bfloat16, torch.float64, torch.float16]
    return [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


def true_norm(gradients: list[torch.Tensor], inv_scale: float) -> float:
    return float(sum((gradient.double() * inv_scale).square().sum() for gradient in gradients))


@pytest.mark.parametrize("scale", [1.0, 3.0, 65536.0])
def test_within_the_bound(scale: float) -> None:
    gradients = gradients_like_real_ones()
    inv_scale = torch.tensor(1 / scale)
    expected = true_norm(gradients, inv_scale.item())
    tolerance = bound([gradient.numel() for gradient in gradients]) * expected
    _, _, from_op = check_unscale_norm(gradients, inv_scale, torch.float32)
    norm = torch.full((), 5.0)
    check_unscale_(gradients, inv_scale, torch.zeros(()), squared_norm=norm)
    assert abs(norm.item() - expected) <= tolerance
    assert abs(from_op.item() - expected) <= tolerance


def test_of_a_check_only() -> None:
    gradients = gradients_like_real_ones()
    norm = torch.full((), 5.0)
    check_(gradients, torch.zeros(()), squared_norm=norm)
    expected = true_norm(gradients, 1.0)
    assert abs(norm.item() - expected) <= bound([gradient.numel() for gradient in gradients]) * expected


def test_squares_are_taken_before_rounding_to_the_dtype() -> None:
    gradients = [torch.full((2049,), 1e-7, dtype=torch.float16)]
    norm = torch.zeros(())
    inv_scale = 2.0**-4
    expected = true_norm(gradients, inv_scale)
    check_unscale_(gradients, torch.tensor(inv_scale), torch.zeros(()), squared_norm=norm)
    assert gradients[0].count_nonzero() == 0
    assert abs(norm.item() - expected) <= bound([2049]) * expected


def test_places_outside_a_gradient_do_not_poison_the_norm() -> None:
    gradients = [torch.ones(3, dtype=torch.float16), torch.ones(2049)]
    norm = torch.zeros(())
    check_unscale_(gradients, torch.tensor(float("inf")), torch.zeros(()), squared_norm=norm)
    assert norm.item() == float("inf")


def test_a_norm_that_overflows_is_no_flag() -> None:
    gradients = [torch.full((4,), 2e19)]
    found_inf, norm = torch.zeros(()), torch.zeros(())
    check_unscale_(gradients, torch.ones(()), found_inf, squared_norm=norm)
    assert norm.item() == float("inf")
    assert found_inf.item() == 0.0


def test_nothing_has_norm_zero_and_nan_shows() -> None:
    norm = torch.ones(())
    check_unscale_([], torch.ones(()), torch.zeros(()), squared_norm=norm)
    assert norm.item() == 0.0
    every = finite_bits(100, torch.float16, torch.Generator().manual_seed(1))
    every[50] = float("nan")
    check_unscale_([every], torch.ones(()), torch.zeros(()), squared_norm=norm)
    assert norm.isnan()


def test_work_adds_to_the_norm() -> None:
    """Which lets launches, devices and gradients that no kernel handles contribute one after the other."""
    norm = torch.full((), 5.0)
    gradients = [torch.ones(3), torch.ones(2, dtype=torch.float16), torch.ones(4)[::2]]
    perform(UnscaleRequest(gradients, gradients, torch.tensor(2.0), squared_norm=norm), keep=False)
    assert norm.item() == 5.0 + 4.0 * 7


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_of_complex_gradients(dtype: torch.dtype) -> None:
    norm = torch.zeros(())
    check_([torch.tensor([3 + 4j, 1j], dtype=dtype), torch.ones(2)], torch.zeros(()), squared_norm=norm)
    assert norm.item() == 28.0
