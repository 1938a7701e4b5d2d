"""Compile kernels for GPUs that need not be here, and count what matters in their machine code."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="machine code needs triton's compiler")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
NVIDIA_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class MachineCode:
    """What matters of a kernel's machine code: counts of 16-byte accesses and of spills to memory."""

    wide_loads: int
    wide_stores: int
    spills: int


def compiled(function: Any, signature: dict[str, str], aligned: int, target: Any, options: dict[str, Any]) -> Any:
    """Compile as a launch would, whose first ``aligned`` arguments start at multiples of 16 bytes."""
    attributes = {(argument,): [["tt.divisibility", 16]] for argument in range(aligned)}
    source = ASTSource(function, signature, constexprs={}, attrs=attributes)
    return triton.compile(source, target=target, options=options)


def nvidia(cubin: bytes, folder: Path) -> MachineCode:
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    if not (NVIDIA_TOOLS / "nvdisasm").exists():
        pytest.skip(f"this triton ships no nvdisasm in {NVIDIA_TOOLS}")
    text = subprocess.run([NVIDIA_TOOLS / "nvdisasm", "-c", path], capture_output=True, text=True, check=True).stdout
    return MachineCode(
        len(re.findall(r"LDG\.E[\w.]*\.128", text)),
        len(re.findall(r"STG\.E[\w.]*\.128", text)),
        len(re.findall(r"\b(?:LDL|STL)\b", text)),
    )


def amd(text: str) -> MachineCode:
    """Scalar registers that are kept in lanes of a vector register are no spill: they move no memory."""
    return MachineCode(
        len(re.findall(r"(?:global|buffer)_load_dwordx4", text)),
        len(re.findall(r"(?:global|buffer)_store_dwordx4", text)),
        sum(map(int, re.findall(r"(?:vgpr_spill_count|private_segment_fixed_size):\s+(\d+)", text))),
    )
