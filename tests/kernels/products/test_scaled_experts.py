"""Products of experts in 8-bit floats: torchao's numbers, gradients of empty groups, and what GPUs receive."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from support.machines.gpu_layouts import require_gpu_layouts
from support.oracles import experts_beside
from support.oracles.mxfp8_beside import RECIPES as MXFP8
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torchao.prototype.mx_formats.utils import from_blocked

from fxamp.kernels.products import grouped_product, scaled_experts
from fxamp.policy import RECIPES, Recipe

ROWWISE = {"rowwise": torch.float8_e4m3fn, "rowwise_fnuz": torch.float8_e4m3fnuz}
GROUPED = (*ROWWISE, *MXFP8)
ENDS = ([0, 40, 41, 77], [32, 64, 64, 77], [77, 77, 77, 77], [3, 5, 40, 70], [0, 0, 0, 0])


def tensors(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, weight and the gradient of the result, for sizes rows, experts, K, N."""
    rows, experts, inner, columns = sizes
    generator = torch.Generator().manual_seed(sum(sizes))
    x, gradient = (torch.randn(rows, size, generator=generator).bfloat16() for size in (inner, columns))
    weight = torch.randn(experts, columns, inner, generator=generator) / inner**0.5
    return x.requires_grad_(), weight.to(dtype).requires_grad_(), gradient


def offsets(ends: list[int]) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def run(product: Any, x: Tensor, weight: Tensor, gradient: Tensor) -> list[Tensor]:
    output = product(x, weight.transpose(1, 2))
    return [output.detach(), *torch.autograd.grad(output, (x, weight), gradient)]


def own(ends: list[int], recipe: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    return lambda x, weight: scaled_experts(x, weight, offsets(ends), None, recipe, dtype)


@pytest.mark.parametrize("recipe", MXFP8)
@pytest.mark.parametrize("ends", [ends for ends in ENDS if ends[-1] == 77])  # torchao takes no rows beyond the last
def test_torchao_computes_the_same(recipe: str, ends: list[int]) -> None:
    operands = tensors(77, 4, 64, 96)
    expected = run(lambda x, w: experts_beside.product(x, w, offsets(ends), recipe), *operands)
    assert_equal(run(own(ends, recipe), *operands), expected)


@pytest.mark.parametrize("recipe", ROWWISE)
@pytest.mark.parametrize("ends", ENDS)
def test_scales_of_rows_are_torchaos(ends: list[int], recipe: str) -> None:
    """bfloat16 rounds a sum to 2^-9 of its value, and float32 adds 96 terms before."""
    x, weight, gradient = tensors(77, 4, 64, 96)
    results = run(own(ends, recipe), x, weight, gradient)
    reference = experts_beside.rowwise(x.detach(), weight.detach().transpose(1, 2), gradient, ends, ROWWISE[recipe])
    expected = (reference[0], reference[1], reference[2].transpose(1, 2))
    for value, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(value.double(), exact, rtol=2**-8, atol=2**-18 * float(exact.abs().max()))


@pytest.mark.parametrize("recipe", GROUPED)
@pytest.mark.parametrize("ends", ENDS)
def test_what_is_in_no_group_is_zero(recipe: str, ends: list[int]) -> None:
    """Rows beyond the last end, and experts without rows, even if they hold NaN."""
    x, weight, gradient = tensors(77, 4, 64, 96, dtype=torch.float32)
    expected = run(own(ends, recipe), x, weight, gradient)
    with torch.no_grad():
        x[ends[-1] :], gradient[ends[-1] :] = torch.nan, torch.inf
    values = run(own(ends, recipe), x, weight, gradient)
    assert all(value.isfinite().all() and torch.equal(value, e) for value, e in zip(values, expected, strict=True))
    output, of_rows, of_weight = values
    assert not output[ends[-1] :].any() and not of_rows[ends[-1] :].any()
    sizes = torch.diff(offsets([0, *ends]))
    assert torch.equal(of_weight.flatten(1).any(1), sizes > 0)


@pytest.mark.parametrize("recipe", GROUPED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_expert_is_a_layer(recipe: str, dtype: torch.dtype) -> None:
    """Without offsets as with them, whichever strides the operands have, and in float32 as in 16 bits."""
    x, weight, gradient = tensors(3 * 20, 3, 64, 96, dtype=torch.float32)
    ends = [20, 40, 60]
    x = x.detach().to(dtype).requires_grad_()
    expected = run(own(ends, recipe, dtype), x, weight, gradient.to(dtype))
    assert [value.dtype for value in expected] == [dtype, dtype, torch.float32]
    apart = x.detach().view(3, 20, 64).transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    strided = weight.detach().permute(2, 0, 1).contiguous().permute(1, 2, 0).requires_grad_()
    output = scaled_experts(apart, strided.transpose(1, 2), None, torch.ones(96), recipe, dtype)
    gradients = torch.autograd.grad(output, (apart, strided), gradient.to(dtype).view(3, 20, 96))
    assert torch.equal(output.detach().view(60, 96), expected[0] + 1)
    assert torch.equal(gradients[0].reshape(60, 64), expected[1]) and torch.equal(gradients[1], expected[2])


@pytest.mark.parametrize("recipe", GROUPED)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_so_and_in_its_group(recipe: str, bad: float) -> None:
    x, weight, gradient = tensors(77, 4, 64, 96)
    spoilt = gradient.clone()
    spoilt[45, 4] = bad
    _, of_rows, of_weight = run(own([0, 40, 41, 77], recipe), x, weight, spoilt)
    assert not of_rows[45].isfinite().any() and of_rows[:45].isfinite().all() and of_rows[46:].isfinite().all()
    assert not of_weight[3, 4].isfinite().any() and of_weight[:3].isfinite().all()
    with torch.no_grad():
        x[45, 4] = bad
    output, _, of_weight = run(own([0, 40, 41, 77], recipe), x, weight, gradient)
    assert not output[45].isfinite().any() and output[:45].isfinite().all()
    assert not of_weight[3, :, 4].isfinite().any() and of_weight[:3].isfinite().all()


def test_gradients_are_made_for_what_needs_them_and_have_none_of_their_own() -> None:
    x, weight, gradient = tensors(77, 4, 64, 96)
    call = own([0, 40, 41, 77], "rceil")
    expected = run(call, x, weight, gradient)
    (of_weight,) = torch.autograd.grad(call(x.detach(), weight.transpose(1, 2)), weight, gradient)
    (of_rows,) = torch.autograd.grad(call(x, weight.detach().transpose(1, 2)), x, gradient)
    assert torch.equal(of_rows, expected[1]) and torch.equal(of_weight, expected[2])
    (first,) = torch.autograd.grad(call(x, weight.transpose(1, 2)).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        first.sum().backward()


def _by_definition(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, ends: Tensor) -> Tensor:
    """What a GPU computes of these operands, after torch's meta kernel accepted their layouts."""
    settings = {"offs": ends, "out_dtype": torch.bfloat16}
    require_gpu_layouts(torch._scaled_grouped_mm, (left, right.transpose(-2, -1), left_scale, right_scale), settings)
    starts = [0, *ends.tolist()]
    spans = [slice(*pair) for pair in pairwise(starts)]
    scales = [left_scale, right_scale]
    if right.dim() == 3:
        result = torch.full((left.shape[0], right.shape[1]), torch.nan, dtype=torch.bfloat16)
        for expert, span in enumerate(spans):
            parts = _row_parts(left_scale, span, expert, starts, left), _expert_part(right_scale, expert, right)
            result[span] = ((left[span].double() * parts[0]) @ (right[expert].double() * parts[1]).t()).bfloat16()
        return result
    result = torch.full((len(spans), left.shape[0], right.shape[0]), torch.nan, dtype=torch.bfloat16)
    for group, span in enumerate(spans):
        if span.start == span.stop:
            continue  # kernels write nothing there
        factors = [
            _sum_part(scale, group, starts, operand) for scale, operand in zip(scales, (left, right), strict=True)
        ]
        result[group] = ((left[:, span].double() * factors[0]) @ (right[:, span].double() * factors[1]).t()).bfloat16()
    return result


def _decoded(flat: Tensor, rows: int, blocks: int) -> Tensor:
    biased = from_blocked(flat.view(torch.uint8), rows, blocks).double()
    return torch.exp2(biased - 127).repeat_interleave(32, 1)


def _row_parts(scale: Tensor, span: slice, group: int, starts: list[int], left: Tensor) -> Tensor:
    if scale.dtype is torch.float32:
        return scale[span].double().unsqueeze(1)
    sizes = [-(-(end - start) // 128) * 128 for start, end in pairwise(starts)]
    begin, blocks = sum(sizes[:group]), left.shape[1] // 32
    return _decoded(scale[begin : begin + sizes[group]].flatten(), sizes[group], blocks)[: span.stop - span.start]


def _expert_part(scale: Tensor, expert: int, right: Tensor) -> Tensor:
    if scale.dtype is torch.float32:
        return scale[expert].double().unsqueeze(1)
    return _decoded(scale[expert], right.shape[1], right.shape[2] // 32)


def _sum_part(scale: Tensor, group: int, starts: list[int], operand: Tensor) -> Tensor:
    if scale.dtype is torch.float32:
        return scale.view(-1, operand.shape[0])[group].double().unsqueeze(1)
    blocks = [(end - start) // 32 for start, end in pairwise(starts)]
    across = [-(-count // 4) * 4 for count in blocks]
    flat, rows = scale.flatten(), scale.shape[0]
    begin = rows * sum(across[:group])
    return _decoded(flat[begin : begin + rows * across[group]], operand.shape[0], blocks[group])


@pytest.mark.parametrize("recipe", GROUPED)
@pytest.mark.parametrize("ends", [*ENDS, [10, 200, 200, 450]])
def test_gpus_receive_the_same_products(recipe: str, ends: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    operands = tensors(max(77, ends[-1]), 4, 64, 160)
    expected = run(own(ends, recipe), *operands)
    if recipe.endswith("_fnuz"):  # torch's meta kernel asks which GPU there is
        monkeypatch.setattr(torch.version, "hip", "7.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(gcnArchName="gfx942"))
    monkeypatch.setattr(grouped_product, "emulates", lambda device: False)
    monkeypatch.setattr(grouped_product, "grouped_kernel", _by_definition)
    for value, reference in zip(run(own(ends, recipe), *operands), expected, strict=True):
        atol = 2**-7 * float(reference.abs().max())
        torch.testing.assert_close(value, reference, rtol=2**-7, atol=atol)


@pytest.mark.parametrize("recipe", GROUPED)
def test_a_gpus_graph_multiplies_groups(recipe: str) -> None:
    def layer(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return scaled_experts(x, weight, ends, None, recipe, torch.bfloat16)

    with FakeTensorMode():
        x, weight = torch.empty(48, 64, dtype=torch.bfloat16, device="cuda"), torch.empty(4, 64, 96, device="cuda")
        graph = make_fx(layer)(x, weight, torch.empty(4, dtype=torch.int32, device="cuda")).graph
    assert len(graph.find_nodes(op="call_function", target=torch.ops.fxamp.scaled_grouped_mm.default)) == 1


def test_scales_of_whole_tensors_are_not_for_groups() -> None:
    assert {name for name, row in RECIPES.items() if row.grouped} >= {Recipe(name) for name in GROUPED}
    assert not RECIPES[Recipe.TENSORWISE].grouped and not RECIPES[Recipe.ROWWISE_WITH_GW_HP].grouped
