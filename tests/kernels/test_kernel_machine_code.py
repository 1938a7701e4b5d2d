"""Machine code for GPUs that need not be here: 16-byte accesses and no spilled registers."""

import pytest
import torch
from support.checks.exhaustive import exhaustive
from support.machines.machine_code import ARCHS, TARGETS, MachineCode, Program, compiled, machine_code

from fxamp.kernels.gradient_request import ScaleRule
from fxamp.kernels.gradient_triton import kernel_name, parameters, source_text
from fxamp.kernels.launch import OPTIONS
from fxamp.kernels.launch_plan import Access, Gradient, Requested, make_plan
from fxamp.kernels.loss_scale_update_triton import update_text

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
PAIRS = [
    (F16, F32),
    (BF16, F32),
    (F32, F32),
    (F16, F16),
    (BF16, BF16),
    (F32, BF16),
    (F64, F64),
    (F32, None),
    (F16, None),
]


def code_for(arch: str, source: torch.dtype, dtype: torch.dtype | None, access: Access) -> MachineCode:
    """With everything requested: what needs most registers."""
    plan = make_plan((Gradient(1, source, dtype, access, True),), Requested(True, True, True), TARGETS[arch].warp_size)
    kernel = plan.groups[0].kernel
    return machine_code(kernel_name(kernel), source_text(kernel), parameters(kernel), OPTIONS, arch)


@pytest.mark.parametrize("pair", exhaustive(PAIRS, always=[(F16, F32), (BF16, BF16)]))
@pytest.mark.parametrize("arch", exhaustive(ARCHS, always=["sm_90"]))
def test_16_bytes_at_a_time_and_no_spills(pair: tuple[torch.dtype, torch.dtype | None], arch: str) -> None:
    """If one dtype is wider, only its accesses have 16 bytes."""
    code = code_for(arch, *pair, Access.WIDE)
    source, stored = pair[0].itemsize, 0 if pair[1] is None else pair[1].itemsize
    assert (code.wide_loads > 0) == (source >= stored)
    assert (code.wide_stores > 0) == (stored >= source)
    assert code.spills == 0


@pytest.mark.parametrize("pair", exhaustive([(F16, None), (F32, None), (BF16, BF16), (F32, F32)], always=[(F16, None)]))
@pytest.mark.parametrize("arch", exhaustive(ARCHS, always=["sm_90"]))
def test_after_the_head_gradients_are_read_as_wide_as_aligned_ones(
    pair: tuple[torch.dtype, torch.dtype | None], arch: str
) -> None:
    assert code_for(arch, *pair, Access.PEELED) == code_for(arch, *pair, Access.WIDE)


@pytest.mark.parametrize("arch", exhaustive(ARCHS, always=["sm_90", "gfx942"]))
def test_gradients_whose_targets_are_aligned_otherwise_are_not_read_16_bytes_at_a_time(arch: str) -> None:
    assert code_for(arch, F16, F32, Access.NARROW) == MachineCode(0, 0, 0)


@pytest.mark.parametrize("arch", ARCHS)
def test_scale_update_compiles(arch: str) -> None:
    signature = {"scale": "*fp32", "growth_tracker": "*i32", "found_inf": "*fp32"}
    text = update_text(ScaleRule(1.1, 0.5, 2000, min_scale=1.0, max_scale=2.0**24))
    options = {"num_warps": 1, "enable_fp_fusion": False}
    result, _ = compiled(Program("update_scale", text, signature, 0, options, 0), arch)
    assert "double" in result.asm["llir"]
