"""The Triton kernels that Inductor generates for a GPU that need not be here, compiled for it."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

#: Prints the modules that Inductor generates, for a process whose torch is prepared for an absent GPU.
GENERATE = """
import json, sys
from fxamp.tools.bench.cost.hooks import prepare_torch
prepare_torch()
import fxamp.torch_devices
from fxamp.backend import policy_in_force
from fxamp.tools.bench.cost import simulated_gpu
from fxamp.tools.bench.cost.compiler import Counted
from fxamp.tools.bench.cost.measure import measure
from fxamp.tools.bench.cost.workload import Workload, Way
file, policy, capability, arch = sys.argv[1:]
if arch:
    policy_in_force._facts = lambda _: {"arch": arch}
simulated_gpu.H100.major, simulated_gpu.H100.minor = divmod(int(capability), 10)
fxamp.torch_devices.has_gpu = lambda _: True
counted = Counted(wants_text=True)
measure(Workload(file, dtype="bfloat16", optimizer="none"), Way(policy), counted)
json.dump([text for _, text in counted.texts], sys.stdout)
"""

#: How many elements a program of Inductor's kernels takes in each direction; any powers of two will do.
BLOCKS = {"XBLOCK": 8, "YBLOCK": 32, "R0_BLOCK": 256, "RSPLIT_SIZE": 64, "NUM_STAGES": 1}


def generated(file: Path, policy: str, capability: int = 90, arch: str = "") -> list[str]:
    """The modules that Inductor generates for the program in ``file``, as on a GPU of a capability such as 90.

    ``arch``: that of an AMD GPU for which the policy is resolved; Inductor's choices stay those for NVIDIA's.
    """
    return printed_modules(GENERATE, str(file), policy, str(capability), arch)


def printed_modules(program: str, *arguments: str) -> list[str]:
    """What a program prints as JSON, in a process of its own: torch is prepared for an absent GPU as it is imported."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    modules: list[str] = json.loads(done.stdout)
    return modules


def kernels(module: str) -> list[tuple[str, str]]:
    """Names and sources of the Triton kernels of a generated module."""
    return re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", module, re.DOTALL)


def machine_code(name: str, text: str, folder: Path, target: str = "sm_90") -> bytes:
    """The kernel as Inductor would compile it for a target of :data:`machine_code.TARGETS`."""
    triton = pytest.importorskip("triton", reason="machine code needs triton's compiler")
    from torch._inductor.runtime import triton_helpers, triton_heuristics
    from triton.compiler import ASTSource

    from support.machines.machine_code import TARGETS

    messages: dict[str, Any] = {}

    def remember(*_: Any, **settings: Any) -> Callable[[Any], Any]:
        messages.update(settings["triton_meta"])
        return lambda function: function

    path = folder / f"{name}.py"
    scope: dict[str, Any] = {"__file__": str(path), "__name__": name}
    path.write_text(text)
    decorators = dict.fromkeys(("pointwise", "reduction", "persistent_reduction", "foreach"), remember)
    absent = patch.object(triton_helpers, "set_driver_to_gpu", lambda: None)
    with absent, patch.multiple(triton_heuristics, **decorators):
        exec(compile(text, str(path), "exec"), scope)
    function = scope[name]
    blocks = {argument: BLOCKS[argument] for argument in function.arg_names if argument in BLOCKS}
    known = blocks | messages["constants"]
    constants = {(function.arg_names.index(argument),): value for argument, value in known.items()}
    signature = messages["signature"] | dict.fromkeys(blocks, "constexpr")
    source = ASTSource(function, signature, constexprs=constants)
    kernel = triton.compile(source, target=TARGETS[target], options={"enable_fp_fusion": True})
    code: bytes = kernel.asm["hsaco" if TARGETS[target].backend == "hip" else "cubin"]
    return code
