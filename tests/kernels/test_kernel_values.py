"""The kernels against torch's own op, bit for bit: in Triton's interpreter, and the reference."""

import pytest
import torch
from kernel_cases import (
    SCALES,
    expected,
    finite_bits,
    inverse,
    random_gradients,
    require_cast,
    require_in_place,
    same_bits,
)

from fxamp.kernels import check_, check_unscale, check_unscale_
from fxamp.kernels.launch_plan import CHUNK, DTYPES

pytestmark = pytest.mark.usefixtures("implementation")

HALF = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("seed", range(16))
def test_in_place_equals_torchs_op(seed: int) -> None:
    require_in_place(random_gradients(seed, DTYPES), inverse(SCALES[seed % len(SCALES)]))


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_default_dtype_changes_nothing(default: torch.dtype) -> None:
    gradients = random_gradients(0, DTYPES)
    inv_scale, found_inf = inverse(SCALES[0]), torch.zeros(())
    reference = expected(gradients, inv_scale)
    torch.set_default_dtype(default)
    try:
        check_unscale_(gradients, inv_scale, found_inf)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found_inf.item() == reference.found_inf
    assert all(map(same_bits, gradients, reference.true))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(100, 104))
def test_to_another_dtype_equals_cast_then_torchs_op(seed: int, dtype: torch.dtype) -> None:
    require_cast(random_gradients(seed, DTYPES), inverse(SCALES[seed % len(SCALES)]), dtype)


@pytest.mark.parametrize("seed", range(200, 206))
def test_check_only_writes_nothing_to_gradients(seed: int) -> None:
    gradients = random_gradients(seed, DTYPES)
    before = [gradient.clone() for gradient in gradients]
    versions = [gradient._version for gradient in gradients]
    found_inf, flags = torch.zeros(1), torch.zeros(len(gradients), dtype=torch.int32)
    check_(gradients, found_inf, flags)
    reference = expected(before, torch.ones(()))
    assert flags.tolist() == reference.flags
    assert found_inf.item() == reference.found_inf
    assert all(map(same_bits, gradients, before))
    assert [gradient._version for gradient in gradients] == versions


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_every_16_bit_value(dtype: torch.dtype, scale: float) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = every[every.isfinite()].clone()
    inv_scale = inverse(scale)
    for gradients in ([finite], [every]):
        reference = expected(gradients, inv_scale)
        found_inf = torch.zeros(())
        check_unscale_(gradients, inv_scale, found_inf)
        assert found_inf.item() == reference.found_inf
        assert same_bits(gradients[0], reference.true[0])


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("numel", [1, 2047, 2048, 2049, 16384, 16385])
def test_one_bad_value_is_found_at_every_edge(numel: int, value: float) -> None:
    for place in {0, numel // 2, numel - 1}:
        gradients = [torch.ones(5), torch.ones(numel), torch.ones(5)]
        gradients[1][place] = value
        found_inf, flags = torch.zeros(()), torch.zeros(3, dtype=torch.int32)
        check_unscale_(gradients, torch.tensor(0.5), found_inf, flags)
        assert flags.tolist() == [0, 1, 0]
        assert found_inf.item() == 1.0
        assert gradients[1].sub(0.5).count_nonzero() == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gradient_starts_and_ends_anywhere(dtype: torch.dtype) -> None:
    """Its head, before an aligned address, may be all of it; what follows the head may need a program less."""
    per_access = 16 // dtype.itemsize
    sizes = (1, 2, per_access - 1, per_access, per_access + 1, 2048 + per_access - 1)
    places = [(place, numel) for place in range(per_access + 1) for numel in sizes]
    places += [(per_access - 1, CHUNK + 1), (1, CHUNK + per_access)]
    generator = torch.Generator().manual_seed(0)
    gradients = [finite_bits(place + numel + 3, dtype, generator)[place : place + numel] for place, numel in places]
    for at in range(0, len(gradients), 3):
        gradients[at][(0, -1)[at % 2]] = float("nan")
    inv_scale, found_inf = inverse(3.0), torch.zeros(())
    flags = torch.zeros(len(gradients), dtype=torch.int32)
    checked = torch.zeros_like(flags)
    check_(gradients, found_inf, checked)
    reference = expected(gradients, inv_scale)
    check_unscale_(gradients, inv_scale, found_inf, flags)
    assert flags.tolist() == checked.tolist() == reference.flags
    assert all(map(same_bits, gradients, reference.true))


def test_overflow_by_unscaling_is_not_reported() -> None:
    gradients = [torch.full((9,), 3e38), torch.full((9,), 6e4, dtype=torch.float16)]
    found_inf = torch.zeros(())
    check_unscale_(gradients, torch.tensor(16.0), found_inf)
    assert found_inf.item() == 0.0
    assert all(gradient.isinf().all() for gradient in gradients)


def test_found_inf_is_sticky_and_flags_are_not() -> None:
    found_inf, flags = torch.ones(()), torch.ones(1, dtype=torch.int32)
    check_unscale_([torch.ones(4)], torch.ones(()), found_inf, flags)
    assert found_inf.item() == 1.0
    assert flags.item() == 0


def test_many_tensors_and_none() -> None:
    gradients = [torch.full((1 + number % 5,), float(number)) for number in range(300)]
    gradients[177][0] = float("nan")
    found_inf, flags = torch.zeros(()), torch.zeros(300, dtype=torch.int32)
    check_unscale_(gradients, torch.tensor(0.5), found_inf, flags)
    assert flags.nonzero().flatten().tolist() == [177]
    assert all(gradient[-1].item() == number / 2 for number, gradient in enumerate(gradients) if number != 177)
    check_unscale_([], torch.tensor(0.5), found_inf, torch.zeros(0, dtype=torch.int32))
    check_unscale_([torch.zeros(0)], torch.tensor(0.5), found_inf.zero_())
    assert found_inf.item() == 0.0


def test_integer_gradients_are_refused_by_torch() -> None:
    with pytest.raises(RuntimeError, match="not implemented for 'Int'"):
        check_unscale_([torch.ones(3, dtype=torch.int32)], torch.ones(()), torch.zeros(()))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("conjugate", [False, True], ids=["", "conjugate"])
def test_complex_gradients(dtype: torch.dtype, conjugate: bool) -> None:
    """torch's op does not take them: the finite check and the product are those of the real and imaginary parts."""
    numbers = [torch.tensor([[3e38 - 4j, 1j], [-2.5, 1 + 1j]], dtype=dtype) for _ in range(4)]
    for gradient, (part, value) in zip(numbers[1:], ((0, "inf"), (1, "-inf"), (1, "nan")), strict=True):
        torch.view_as_real(gradient)[1, 0, part] = float(value)
    gradients = [*(gradient.conj() if conjugate else gradient for gradient in numbers), torch.ones(3)]
    expected = torch.view_as_real(gradients[0].resolve_conj()) / 4
    found_inf, flags = torch.zeros(()), torch.zeros(5, dtype=torch.int32)
    check_(gradients, found_inf, flags)
    assert (found_inf.item(), flags.tolist()) == (1.0, [0, 1, 1, 1, 0])
    check_unscale_(gradients, torch.tensor(0.25), found_inf.zero_(), flags)
    assert (found_inf.item(), flags.tolist()) == (1.0, [0, 1, 1, 1, 0])
    assert torch.equal(torch.view_as_real(gradients[0].resolve_conj()), expected)
    assert gradients[-1].tolist() == [0.25] * 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_around_a_gradient_is_left_alone(dtype: torch.dtype) -> None:
    storage = torch.ones(20_000, dtype=dtype)
    gradients = [storage[7:2056], storage[3000:3001], storage[3008:19_999]]
    check_unscale_(gradients, torch.tensor(0.5), torch.zeros(()))
    expected = torch.ones(20_000, dtype=dtype)
    for gradient in gradients:
        expected[gradient.storage_offset() :][: gradient.numel()] = 0.5
    assert storage.equal(expected)


def test_nan_of_any_payload_stays_nan_in_bfloat16() -> None:
    """Rounding the bits alone would carry 0x7FFFFFFF, which is a GPU's NaN, into -0, and 0x7F800001 into inf."""
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, -0x7FFFFF], dtype=torch.int32)
    (true,), flags = check_unscale([bits.view(torch.float32)], torch.ones(()), torch.bfloat16)
    assert true.isnan().all()
    assert flags.item() == 1


def test_the_oracle_of_bfloat16_is_torchs_op_where_it_has_one() -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for scale in SCALES:
        theirs, found_inf = every.clone(), torch.zeros(())
        torch._amp_foreach_non_finite_check_and_unscale_([theirs], found_inf, inverse(scale))
        ours = expected([every], inverse(scale))
        assert ours.found_inf == found_inf.item() and same_bits(ours.true[0], theirs)
