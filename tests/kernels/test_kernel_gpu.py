"""The compiled kernels on a real device against torch's own ops there, and under CUDA graph capture."""

import math

import pytest
import torch
from kernel_cases import SCALES, expected, inverse, random_gradients, require_cast, require_in_place, same_bits
from support.machines.lacks import ON_GPU
from torch import Tensor

from fxamp.kernels import (
    Implementation,
    ScaleRule,
    check_,
    check_unscale,
    check_unscale_,
    check_unscale_norm,
    update_scale_,
)
from fxamp.kernels.dispatch import implementation
from fxamp.kernels.launch_plan import DTYPES
from fxamp.tools.common.cuda_syncs import no_cuda_syncs

pytestmark = ON_GPU


def on_gpu(seed: int) -> list[Tensor]:
    """Random gradients on the GPU, with the layouts and the alignments that they have on the CPU.

    Those in float64 are within float32's range: torch's op rounds them to float32 before its check, there alone.
    """
    moved, largest = [], torch.finfo(torch.float32).max
    for gradient in random_gradients(seed, DTYPES):
        if gradient.dtype is torch.float64:
            gradient[gradient.isfinite() & (gradient.abs() > largest)] = largest
        storage = torch.empty(6000, dtype=gradient.dtype, device="cuda")
        offset = gradient.storage_offset()
        moved.append(storage.as_strided(gradient.shape, gradient.stride(), offset).copy_(gradient))
    return moved


def test_triton_is_chosen() -> None:
    pytest.importorskip("triton")
    assert implementation(torch.device("cuda", 0)) is Implementation.TRITON


@pytest.mark.parametrize("seed", range(24))
def test_in_place_equals_torchs_op(seed: int) -> None:
    require_in_place(on_gpu(seed), inverse(SCALES[seed % len(SCALES)], "cuda"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(100, 104))
def test_to_another_dtype_equals_cast_then_torchs_op(seed: int, dtype: torch.dtype) -> None:
    require_cast(on_gpu(seed), inverse(SCALES[seed % len(SCALES)], "cuda"), dtype)


def test_check_only_writes_nothing() -> None:
    gradients = on_gpu(200)
    before = [gradient.clone() for gradient in gradients]
    found_inf, flags = torch.zeros((), device="cuda"), torch.zeros(len(gradients), dtype=torch.int32, device="cuda")
    check_(gradients, found_inf, flags)
    assert flags.tolist() == expected(before, torch.ones((), device="cuda")).flags
    assert all(map(same_bits, gradients, before))


def test_a_large_gradient_and_its_norm() -> None:
    gradient = torch.randn(3_000_001, device="cuda", dtype=torch.float16)
    gradient[-1] = 1.0
    (true,), flags, norm = check_unscale_norm([gradient], torch.tensor(0.5, device="cuda"), torch.float32)
    assert same_bits(true, gradient.float() * 0.5)
    assert flags.item() == 0
    # Far above the sum's error (its tree of additions is some 30 deep), far below one wrong block's share.
    assert norm.item() == pytest.approx(true.double().square().sum().item(), rel=1e-5)


def test_gradients_on_cpu_and_gpu_together() -> None:
    gradients = [torch.ones(3, device="cuda"), torch.ones(5), torch.ones(2, device="cuda", dtype=torch.float16)]
    gradients[1][2] = math.inf
    found_inf, flags = torch.zeros((), device="cuda"), torch.zeros(3, dtype=torch.int32, device="cuda")
    norm = torch.zeros((), device="cuda")
    check_unscale_(gradients, torch.tensor(0.5, device="cuda"), found_inf, flags, norm)
    assert (found_inf.item(), flags.tolist(), norm.item()) == (1.0, [0, 1, 0], math.inf)
    assert gradients[1].tolist() == [0.5, 0.5, math.inf, 0.5, 0.5]


def test_no_host_sync_once_warm() -> None:
    gradients = [torch.ones(100, device="cuda"), torch.ones(50, device="cuda", dtype=torch.float16)]
    inv_scale, found_inf = torch.tensor(0.5, device="cuda"), torch.zeros((), device="cuda")
    scale, tracker = torch.tensor(2.0, device="cuda"), torch.tensor(0, dtype=torch.int32, device="cuda")
    flags, norm = torch.zeros(2, dtype=torch.int32, device="cuda"), torch.zeros((), device="cuda")

    def step(grads: list[Tensor]) -> None:
        check_unscale_(grads, inv_scale, found_inf, flags, norm)
        check_unscale(grads, inv_scale, torch.float32)
        update_scale_(scale, tracker, found_inf, ScaleRule(2.0, 0.5, 2))

    step(gradients)
    moved = [gradient.clone() for gradient in gradients]
    with no_cuda_syncs():
        step(gradients)
        step(moved)


def test_captured_in_a_cuda_graph() -> None:
    gradients = [torch.ones(5000, device="cuda"), torch.ones(50, device="cuda", dtype=torch.float16)]
    inv_scale, found_inf = torch.tensor(0.5, device="cuda"), torch.zeros((), device="cuda")
    scale, tracker = torch.tensor(8.0, device="cuda"), torch.tensor(0, dtype=torch.int32, device="cuda")
    flags = torch.zeros(2, dtype=torch.int32, device="cuda")

    def step() -> Tensor:
        found_inf.zero_()
        (copy,), _ = check_unscale([gradients[1]], inv_scale, torch.float32)
        check_unscale_(gradients, inv_scale, found_inf, flags)
        update_scale_(scale, tracker, found_inf, ScaleRule(2.0, 0.5, 1000))
        return copy

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy = step()
    trash = [torch.full((1000,), 7, device="cuda") for _ in range(50)]  # what a freed table would be overwritten with
    for gradient in gradients:
        gradient.fill_(4.0)
    graph.replay()
    assert [gradient.unique().tolist() for gradient in gradients] == [[2.0], [2.0]]
    assert (copy.unique().tolist(), found_inf.item(), flags.tolist(), scale.item()) == ([2.0], 0.0, [0, 0], 8.0)
    gradients[1][49] = math.nan
    graph.replay()
    assert (found_inf.item(), flags.tolist(), scale.item()) == (1.0, [0, 1], 4.0)
    assert gradients[0].unique().tolist() == [1.0]
    assert len(trash) == 50


@pytest.mark.inductor
def test_inductors_cuda_graphs() -> None:
    def program(first: Tensor, second: Tensor, inv_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (one, two), flags = torch.ops.fxamp.check_unscale([first * 2, second + 1], inv_scale, torch.float32)
        return one + 1, two * 2, flags.amax()

    compiled = torch.compile(program, mode="reduce-overhead", fullgraph=True)
    inv_scale = torch.tensor(0.5, device="cuda")
    for value in (1.0, 2.0, 3.0, math.inf):
        first = torch.full((300,), value, device="cuda", dtype=torch.float16)
        second = torch.ones(40, 7, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        one, two, bad = compiled(first, second, inv_scale)
        assert one.unique().tolist() == [value + 1]
        assert two.unique().tolist() == [2.0]
        assert bad.item() == int(math.isinf(value))
