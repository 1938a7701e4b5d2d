"""8-bit codes with a scale for each block, and stochastic rounding: against float64 arithmetic on the values."""

import pytest
import torch
from support.checks.equality import assert_equal
from torch import Tensor

from fxamp.kernels.blockwise_8bit import (
    BLOCK,
    CODES,
    block_scales,
    decode,
    draw_key,
    encode,
    random_bits,
    stochastic_round,
)

KEY = torch.tensor(12345, dtype=torch.int32)
DRAWS = 300


def values(signed: bool, count: int = 3000) -> Tensor:
    """Over thirty binary orders of magnitude, zeros among them; the last block is not full."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(count, generator=generator) * torch.exp2(torch.randn(count, generator=generator) * 6)
    wide[::97] = 0
    return wide if signed else wide.square()


def there_and_back(value: Tensor, code: str, slot: int = -1, key: Tensor = KEY) -> Tensor:
    scales = block_scales(value)
    result: Tensor = decode(encode(value, scales, key, code, slot), scales, code)
    return result


def grid(code: str) -> Tensor:
    """Every value that the code has for a block whose largest is in [1, 2)."""
    form = CODES[code]
    magnitudes = torch.arange(form.top + 1, dtype=torch.uint8)
    ones = torch.full((1,), 127, dtype=torch.int16)
    values: Tensor = torch.cat([decode(part, ones, code) for part in magnitudes.split(BLOCK)]).double()
    return torch.cat([-values.flip(0), values]).unique() if form.signed else values


@pytest.mark.parametrize("code", CODES)
def test_the_nearest_value_is_taken(code: str) -> None:
    """Half a step away at most, and never further than any other value of the code."""
    table = grid(code)
    value = values(CODES[code].signed, BLOCK)
    value = value / value.abs().max() * 1.9
    rounded = there_and_back(value, code).double()
    best = (value.double()[:, None] - table).abs().min(dim=1).values
    keeps = (value == 0) | CODES[code].signed | (value >= table[1])
    assert_equal((value.double() - rounded).abs()[keeps], best[keeps])


@pytest.mark.parametrize("code", CODES)
def test_packing_again_changes_nothing(code: str) -> None:
    value = values(CODES[code].signed)
    once = there_and_back(value, code)
    scales = block_scales(value)
    assert torch.equal(block_scales(once), scales)
    assert torch.equal(encode(once, scales, KEY, code, -1), encode(value, scales, KEY, code, -1))
    assert torch.equal(there_and_back(once, code, slot=0), once)


def test_what_is_above_zero_stays_above_zero_without_a_sign() -> None:
    value = torch.tensor([1.0, 1e-20, 1e-37, 0.0])
    for slot in (-1, 0):
        rounded = there_and_back(value, "u5m3", slot)
        assert (rounded[:3] > 0).all() and rounded[3] == 0


@pytest.mark.parametrize("code", [*CODES, "bfloat16"])
def test_stochastic_rounding_is_right_on_average(code: str) -> None:
    """The mean of many draws is as far from the value as chance lets it be: by 5 standard errors of all means."""
    value = values(code == "bfloat16" or CODES[code].signed)
    keys = [draw_key(torch.tensor(count, dtype=torch.int32), KEY) for count in range(DRAWS)]
    if code == "bfloat16":
        chosen = value != 0
        drawn = torch.stack([stochastic_round(value, key, 0).double() for key in keys])
    else:
        top = block_scales(value).float().sub(127).exp2().repeat_interleave(BLOCK)[: len(value)]
        # Above the last code all round down, and unsigned values never round to 0.
        chosen = (value.abs() < 1.8 * top) & (value.abs() > 1e-3 * top)
        drawn = torch.stack([there_and_back(value, code, 0, key).double() for key in keys])
    spread = drawn.std(dim=0)
    chosen &= spread > 0
    error = (drawn.mean(dim=0) - value.double())[chosen] / (spread[chosen] / DRAWS**0.5)
    assert error.mean().abs() < 5 / len(error) ** 0.5 and (error.std() - 1).abs() < 5 / (2 * len(error)) ** 0.5


def test_random_bits_differ_by_key_slot_and_index() -> None:
    like = torch.empty(1000)
    drawn = [
        random_bits(like, torch.tensor(key, dtype=torch.int32), slot) for key in (1 << 20, 3 << 20) for slot in (0, 1)
    ]
    assert len(torch.cat(drawn).unique()) > 3990
    assert torch.equal(drawn[0], random_bits(like, torch.tensor(1 << 20, dtype=torch.int32), 0))


def excess(*drawn: Tensor) -> float:
    """By how many standard deviations Pearson's statistic of the drawn bits' upper bits is above that of chance."""
    width = 8 // len(drawn)
    cells = sum(((bits >> (32 - width)) & ((1 << width) - 1)).long() << (width * at) for at, bits in enumerate(drawn))
    assert isinstance(cells, Tensor)
    counts = torch.bincount(cells, minlength=256).double()
    mean = counts.sum() / 256
    return float(((counts - mean).square().sum() / mean - 255) / (2 * 255) ** 0.5)


def test_random_bits_are_even_and_independent() -> None:
    """Of one element's uses, of its neighbours, of successive steps, of two parameters: as even as chance lets be."""
    like, streams = torch.empty(1 << 18), torch.tensor([3, 1 << 20], dtype=torch.int32)
    keys = [draw_key(torch.tensor(count, dtype=torch.int32), streams[0]) for count in (0, 1, 2, 1000)]
    other = draw_key(torch.tensor(0, dtype=torch.int32), streams[1])
    for key in keys:
        slots = [random_bits(like, key, slot) for slot in range(4)]
        assert all(abs(excess(bits)) < 5 for bits in slots)
        assert all(abs(excess(one, two)) < 5 for at, one in enumerate(slots) for two in slots[:at])
        assert abs(excess(*slots)) < 5
        assert all(abs(excess(bits, bits.roll(by))) < 5 for bits in slots[:2] for by in (1, 32, 256, 1 << 16))
    for one, two in zip(keys, [*keys[1:], other], strict=True):
        assert all(abs(excess(random_bits(like, one, slot), random_bits(like, two, slot))) < 5 for slot in range(3))


def test_inf_and_nan_show_in_their_block_alone() -> None:
    value = torch.ones(2 * BLOCK)
    value[3] = float("inf")
    rounded = there_and_back(value, "s3m4")
    assert not rounded[:BLOCK].isfinite().any() and rounded[BLOCK:].eq(1).all()
    value[3] = float("nan")
    assert not there_and_back(value, "s3m4")[3].isfinite()
    assert stochastic_round(value, KEY, 0)[3].isnan()


def test_the_largest_and_the_smallest_floats() -> None:
    largest = torch.tensor([torch.finfo(torch.float32).max, -1.0, 0.0])
    assert there_and_back(largest, "s3m4").isfinite().all()
    assert there_and_back(torch.tensor([1e-40, 0.0]), "u5m3").eq(0).all()
    assert there_and_back(torch.zeros(3), "s3m4").eq(0).all()
