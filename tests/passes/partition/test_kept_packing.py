"""Packing and unpacking in a graph: what comes back, and what is refused."""

import math
import struct
from math import inf, nan
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks.equality import assert_equal
from support.machines.lacks import ON_GPU
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

from fxamp.graph import GraphWriter
from fxamp.passes.shared import float8_bits, kept_packing
from fxamp.passes.shared.kept_packing import Packing, PackWriter, plan_packing
from fxamp.policy import Rule
from fxamp.policy.model.keep_rule import EIGHT_BITS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rule(keep: str) -> Rule:
    return Rule("a", keep=keep, region="kept", ops=("mm",))  # type: ignore[arg-type]


def packed_and_back(value: Tensor, keep: str, **unpacking: Any) -> tuple[Tensor, list[Tensor], Packing]:
    """``value`` as it comes back, its parts, and how it was packed."""
    plan = plan_packing(value, rule(keep))
    assert isinstance(plan, Packing), plan
    graph, mode = Graph(), FakeTensorMode()
    source = graph.placeholder("value")
    source.meta["val"] = mode.from_tensor(value)
    writer = PackWriter(GraphWriter(graph, mode))
    parts = writer.pack(source, plan, "a test")
    graph.output((writer.unpack(parts, plan, **unpacking), parts))
    with torch.no_grad():
        return *GraphModule(torch.nn.Module(), graph)(value), plan


def round_trip(value: Tensor, keep: str) -> tuple[Tensor, list[Tensor], Packing]:
    """As above; it comes back in its layout and dtype."""
    back, packed, plan = packed_and_back(value, keep)
    assert back.shape == value.shape and back.stride() == value.stride() and back.dtype == value.dtype
    return back, packed, plan


def of_codes(codes: Tensor, plan: Packing) -> Tensor:
    """What comparisons with zero read in place of the value."""
    graph, mode = Graph(), FakeTensorMode()
    source = graph.placeholder("codes")
    source.meta["val"] = mode.from_tensor(codes)
    graph.output(PackWriter(GraphWriter(graph, mode)).unpack_signs(source, plan))
    back: Tensor = GraphModule(torch.nn.Module(), graph)(codes)
    return back


@pytest.fixture
def without_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU before capability 8.9."""
    monkeypatch.setattr(kept_packing, "converts_float8", lambda _: False)


@pytest.mark.usefixtures("without_float8")
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_by_bits_are_those_of_the_conversion(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.randn(4, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    value[1] *= torch.logspace(-12, 3, 256, base=2).to(dtype)
    value[2, :8] = torch.tensor([0.0, -0.0, inf, -inf, nan, 1e-7, -1e-7, 3.0]).to(dtype)
    value[3] = 0.0
    back, (codes, scale), plan = round_trip(value, "float8_e4m3fn")
    assert codes.dtype is torch.uint8 and plan.has_signs and plan.words == "float8_e4m3fn/128"
    signs = of_codes(codes, plan)
    monkeypatch.setattr(kept_packing, "converts_float8", lambda _: True)
    expected, (floats, scales), other = round_trip(value, "float8_e4m3fn")
    bits, nans = floats.view(torch.uint8), floats.float().isnan()
    assert torch.equal(codes[~nans], bits[~nans]) and (codes[nans] & 0x7F == 0x7F).all() and torch.equal(scale, scales)
    assert_equal(back, expected, equal_nan=True)
    assert_equal(signs, of_codes(floats, other), equal_nan=True)


DEVICES = ["cpu", pytest.param("cuda", marks=[*ON_GPU, pytest.mark.inductor])]


@pytest.mark.parametrize("device", DEVICES)
def test_every_code_by_bits_and_every_value_between_two(device: str) -> None:
    """On a GPU as Inductor compiles it, against the conversion on the CPU."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    floats = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(by_bits(float8_bits.decode, codes, device).nan_to_num(500.0), floats.nan_to_num(500.0))
    ordered = floats[floats.isfinite()].sort().values
    between = torch.cat([ordered[:-1].lerp(ordered[1:], part) for part in (0.0, 0.25, 0.5, 0.75)])
    values = torch.cat([between, torch.nextafter(between, torch.tensor(inf)), -between]).clamp(-448, 448)
    assert torch.equal(by_bits(float8_bits.encode, values, device), values.to(torch.float8_e4m3fn).view(torch.uint8))


def by_bits(function: Any, value: Tensor, device: str) -> Tensor:
    graph, mode = Graph(), FakeTensorMode()
    source = graph.placeholder("value")
    source.meta["val"] = mode.from_tensor(value.to(device))
    graph.output(function(GraphWriter(graph, mode).call, source))
    module = GraphModule(torch.nn.Module(), graph)
    result: Tensor = (module if device == "cpu" else torch.compile(module))(value.to(device))
    return result.cpu()


@pytest.mark.parametrize("keep", [keep for keep in EIGHT_BITS if "float" in keep])
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_of_floats_compare_with_zero_as_the_value_does(keep: str, dtype: torch.dtype) -> None:
    value = torch.randn(2, 64, 4, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    value[0, :, 0] = torch.tensor([0.0, -0.0, inf, -inf, nan, 1e-7, -1e-7, 3.0]).to(dtype)
    for layout in (value, value.contiguous(memory_format=torch.channels_last)):
        back, (codes, _), plan = round_trip(layout, keep)
        assert plan.has_signs
        signs = of_codes(codes, plan)
        assert signs.stride() == back.stride(), "as what it stands for"
        for compare in (torch.le, torch.lt, torch.ge, torch.gt):
            assert torch.equal(compare(signs, 0), compare(back, 0))


@pytest.mark.parametrize("converts", [True, False], ids=["converted", "by bits"])
@pytest.mark.parametrize("keep", [keep for keep in EIGHT_BITS if "float" in keep])
@pytest.mark.parametrize("dtype", DTYPES)
def test_floats_keep_the_sign_of_the_smallest_beside_the_largest(
    keep: str, dtype: torch.dtype, converts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_packing, "converts_float8", lambda _: converts)
    limits = torch.finfo(dtype)
    magnitudes = torch.logspace(math.log2(limits.tiny), 0, 63, base=2, dtype=torch.float64)
    for largest in (limits.max, 1.0):
        value = torch.zeros(2, 128)
        value[0, :63], value[0, 63:126], value[0, 126:] = magnitudes, -magnitudes, torch.tensor([largest, -0.0])
        value[1, :4] = torch.tensor([inf, -inf, nan, limits.tiny])
        value = value.to(dtype)
        back, (codes, scale), plan = round_trip(value, keep)
        for signs in (back, of_codes(codes, plan)):
            assert_equal(signs.sign(), value.float().sign().to(signs.dtype))
        assert back[1, :2].isinf().all() and back[1, 2].isnan()
        smallest = {"float8_e4m3fn": 2.0**-9, "float8_e5m2": 2.0**-16}[keep] * scale[0].double()
        original = value[0].double()
        assert ((back[0].double() - original).abs() <= 1.01 * (original.abs() / 8 + smallest)).all()


def test_codes_of_integers_do_not_tell_a_number_from_nan() -> None:
    _, (codes, _), plan = round_trip(torch.full((1, 64), nan), "int8")
    assert not plan.has_signs and (of_codes(codes, plan) < 0).all()


@pytest.mark.parametrize("keep", EIGHT_BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_block_has_its_scale_and_what_is_not_finite_survives(keep: str, dtype: torch.dtype) -> None:
    value = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    value[0, :128] *= 1e3  # another block's scale must not feel it
    value[1] = 0.0
    value[2, 3:6] = torch.tensor([inf, -inf, nan])
    value[2, 200] = torch.finfo(dtype).max
    back, (codes, scale), plan = round_trip(value, keep)
    assert plan.block == 128 and codes.element_size() == 1 and scale.dtype is torch.bfloat16 and scale.numel() == 6
    special = ~value.isfinite()
    assert torch.equal(back.isnan(), value.isnan()) and torch.equal(back[value.isinf()], value[value.isinf()])
    assert back[~special].isfinite().all(), "what was finite stays so"
    assert torch.equal(back[1], value[1])
    step = {"int8": 1 / 126 / 2, "float8_e4m3fn": 1 / 16, "float8_e5m2": 1 / 8}[keep]
    for block in (value[0, :128], value[0, 128:]):
        error = (back[0, :128] if block[0] == value[0, 0] else back[0, 128:]).double() - block.double()
        assert error.abs().max() <= (1.02 * step + torch.finfo(dtype).eps) * block.abs().max().double()


#: Every float16 as likely as another, infinities and NaNs among them.
HALVES = st.integers(0, 2**16 - 1).map(lambda bits: struct.unpack("<e", struct.pack("<H", bits))[0])


@given(
    st.lists(HALVES, min_size=16, max_size=48),
    st.sampled_from(list(EIGHT_BITS)),
    st.sampled_from(DTYPES),
)
def test_signs_kinds_and_order_survive(numbers: list[float], keep: str, dtype: torch.dtype) -> None:
    value = torch.tensor(numbers).to(dtype)
    back, _, _ = round_trip(value, keep)
    assert torch.equal(back.isnan(), value.isnan()) and torch.equal(back.isinf(), value.isinf())
    finite = value.isfinite()
    assert (back[finite].double() * value[finite].double() >= 0).all()
    ordered = value[finite].double().argsort()
    assert (back[finite].double()[ordered].diff() >= 0).all()


@pytest.mark.parametrize("keep", ["bfloat16", "float16"])
def test_wide_values_are_rounded(keep: str) -> None:
    value = torch.tensor([[1.0 + 2**-12, 7e4, inf, nan]])
    back, (narrow,), plan = round_trip(value, keep)
    assert narrow.dtype is getattr(torch, keep) and plan.words == keep
    assert torch.equal(back.nan_to_num(5.0), value.to(narrow.dtype).float().nan_to_num(5.0))


@pytest.mark.parametrize(
    ("shape", "axis", "trailing", "block"),
    [
        ((4, 256), 1, (256,), 128),
        ((4, 8, 64), 2, (64,), 64),  # blocks stay within a row
        ((3, 200), 1, (200,), 100),  # the largest divisor
        ((4, 8, 16), 2, (8, 16), 128),  # short rows are joined
        ((2, 64, 5, 5), 1, (64,), 64),  # an image's channels
        ((2, 64, 5, 112), 1, (64,), 64),
        ((2, 4, 8, 64), 3, (64,), 64),
        ((2, 32, 8, 64), 3, (64,), 64),  # heads of attention
        ((8, 4, 7, 7), 3, (7, 7), 49),
        ((1, 131), 1, (131,), 131),  # one scale a row
        ((16,), 0, (16,), 16),
    ],
)
def test_blocks_fit_the_sizes(shape: tuple[int, ...], axis: int, trailing: tuple[int, ...], block: int) -> None:
    value = torch.randn(shape)
    back, (codes, scale), plan = round_trip(value, "int8")
    assert (plan.order[-1], plan.trailing, plan.block) == (axis, trailing, block)
    assert scale.numel() * block == value.numel() == codes.numel()
    assert (back - value).abs().max() <= value.abs().max() / 126 / 2 * 1.02


def test_values_may_lie_in_any_order() -> None:
    generator = torch.Generator().manual_seed(0)
    permuted = torch.randn(2, 3, 64, generator=generator).permute(1, 2, 0)  # the innermost dimension is the second
    images = torch.randn(2, 64, 4, 4, generator=generator).to(memory_format=torch.channels_last)
    short = torch.randn(2, 6, 4, 5, generator=generator).to(memory_format=torch.channels_last)
    for value, axis in ((permuted, 1), (images, 1), (short, 1)):
        back, (codes, scale), plan = round_trip(value, "int8")
        assert plan.order[-1] == axis and codes.numel() == value.numel() >= 16 * scale.numel()
        assert (back - value).abs().max() <= value.abs().max() / 126 / 2 * 1.02


def test_without_strides_nothing_is_copied_back() -> None:
    value = torch.randn(2, 64, 4, 4)
    back, (codes, _), _ = packed_and_back(value, "int8", strides=False)
    assert codes.is_contiguous() and back.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(back, round_trip(value, "int8")[0])


@pytest.mark.parametrize(
    ("value", "keep", "reason"),
    [
        (torch.ones(4, 4, dtype=torch.float64), "int8", "it is float64"),
        (torch.ones(4, 4, dtype=torch.bool), "int8", "it is bool"),
        (torch.ones(4, 4, dtype=torch.bfloat16), "bfloat16", "16 bits already"),
        (torch.ones(()), "int8", "no row"),
        (torch.ones(4, 0), "int8", "no row"),
        (torch.ones(4, 16)[:, ::2], "int8", "do not fill its memory"),
        (torch.ones(1, 2, dtype=torch.bfloat16), "int8", "too short"),
    ],
)
def test_what_cannot_be_packed_is_logged(value: Tensor, keep: str, reason: str) -> None:
    plan = plan_packing(value, rule(keep))
    assert isinstance(plan, str) and reason in plan
