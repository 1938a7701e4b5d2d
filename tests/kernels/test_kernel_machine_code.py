"""Machine code for GPUs that need not be here: 16-byte accesses and no spilled registers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from exhaustive import each_once
from machine_code import TARGETS, MachineCode, amd, compiled, nvidia

from fxamp.kernels.launch import OPTIONS
from fxamp.kernels.plan import Asked, Gradient, Kernel, make_plan
from fxamp.kernels.source import kernel_name, parameters, source_text
from fxamp.kernels.store import load_function
from fxamp.kernels.update_source import update_text

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


def machine_code(kernel: Kernel, target: Any, folder: Path) -> MachineCode:
    function = load_function(kernel_name(kernel), source_text(kernel))
    result = compiled(function, parameters(kernel), 2, target, OPTIONS)
    return amd(result.asm["amdgcn"]) if target.backend == "hip" else nvidia(result.asm["cubin"], folder)


def kernel_for(target: Any, source: torch.dtype, dtype: torch.dtype | None, aligned: bool, asked: Asked) -> Kernel:
    return make_plan((Gradient(1, source, dtype, aligned, True),), asked, target.warp_size).groups[0].kernel


@each_once("pair, name", PAIRS, TARGETS)
def test_16_bytes_at_a_time_and_no_spills(
    pair: tuple[torch.dtype, torch.dtype | None], name: str, tmp_path: Path
) -> None:
    """With everything asked: what needs most registers. If one dtype is wider, only its accesses have 16 bytes."""
    kernel = kernel_for(TARGETS[name], *pair, aligned=True, asked=Asked(True, True, True))
    code = machine_code(kernel, TARGETS[name], tmp_path)
    source, stored = pair[0].itemsize, 0 if pair[1] is None else pair[1].itemsize
    assert (code.wide_loads > 0) == (source >= stored)
    assert (code.wide_stores > 0) == (stored >= source)
    assert code.spills == 0


@pytest.mark.parametrize("name", TARGETS)
def test_gradients_that_are_not_aligned_are_not_read_16_bytes_at_a_time(name: str, tmp_path: Path) -> None:
    kernel = kernel_for(TARGETS[name], F16, F32, aligned=False, asked=Asked(True, True, True))
    code = machine_code(kernel, TARGETS[name], tmp_path)
    assert code == MachineCode(0, 0, 0)


@pytest.mark.parametrize("name", TARGETS)
def test_scale_update_compiles(name: str) -> None:
    signature = {"scale": "*fp32", "growth_tracker": "*i32", "found_inf": "*fp32"}
    function = load_function("update_scale", update_text(1.1, 0.5, 2000, min_scale=1.0, max_scale=2.0**24))
    result = compiled(function, signature, 0, TARGETS[name], {"num_warps": 1, "enable_fp_fusion": False})
    assert "double" in result.asm["llir"]
