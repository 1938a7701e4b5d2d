"""What products in fp8 cost on a GPU by the count, and that the kernels which Inductor generates for them compile."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from cost_counting import Counting
from exhaustive import exhaustive

from fxamp.tools.bench.cost.count import Count
from fxamp.tools.bench.cost.row import Rates, row
from fxamp.tools.bench.cost.workload import Way, Workload
from fxamp.tools.bench.train.models import MODELS

#: The feed-forward layer of Llama 3 8B, for 8192 tokens.
LAYER = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(4096)
        self.gate, self.up, self.down = (nn.Linear(*size, bias=False) for size in [(4096, 14336)] * 2 + [(14336, 4096)])

    def forward(self, x):
        y = self.norm(x)
        return (x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))).float().square().mean()

model, inputs = Layer(), (torch.zeros(8192, 4096, requires_grad=True),)
"""
WEIGHT = 4096 * 14336
FP8 = ("cuda-bfloat16-fp8", "cuda-bfloat16-fp8-rowwise")


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layer") / "layer.py"
    path.write_text(LAYER)
    return path


@pytest.fixture(scope="module")
def counted(layer: Path, counting: Counting) -> dict[str, Count]:
    workload = Workload(str(layer), dtype="bfloat16", optimizer="none")
    return {policy: counting(workload, Way(policy)) for policy in ("cuda-bfloat16", *FP8)}


def milliseconds(count: Count) -> float:
    return row("", "", count).milliseconds(Rates())


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", FP8)
def test_a_layer_of_llama_takes_at_most_four_fifths_of_the_time(counted: dict[str, Count], policy: str) -> None:
    assert milliseconds(counted[policy]) <= 0.80 * milliseconds(counted["cuda-bfloat16"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", FP8)
def test_all_products_are_in_fp8_and_no_weight_is_kept_in_it(counted: dict[str, Count], policy: str) -> None:
    flops, plain = counted[policy].flops, counted["cuda-bfloat16"]
    assert {dtype.partition("_")[0] for dtype in flops} == {"float8"}
    assert sum(flops.values()) == sum(plain.flops.values()) == 3 * 3 * 2 * 8192 * WEIGHT
    sizes = {tuple(sorted(each.shape)) for each in counted[policy].kept if each.dtype.startswith("float8")}
    assert (4096, 14336) not in sizes
    assert counted[policy].kept_bytes < plain.kept_bytes


@pytest.mark.exhaustive
def test_gpt2_takes_no_longer(counting: Counting) -> None:
    sizes = dict(MODELS["gpt2-124m"].sizes["full"]) | {"layers": 1}
    workload = Workload("gpt2-124m", dtype="bfloat16", sizes=sizes)
    plain, *others = (milliseconds(counting(workload, Way(policy))) for policy in ("cuda-bfloat16", *FP8))
    assert all(each <= plain for each in others)


#: Prints the modules that Inductor generates, for a process whose torch is prepared for an absent GPU.
GENERATE = """
import json, sys
from fxamp.tools.bench.cost.hooks import prepare_torch
pretended = prepare_torch()
from fxamp.tools.bench.cost.compiler import Counted
from fxamp.tools.bench.cost.measure import measure
from fxamp.tools.bench.cost.workload import Workload, Way
counted = Counted(wants_text=True)
measure(Workload(sys.argv[1], dtype="bfloat16", optimizer="none"), Way(sys.argv[2]), pretended, counted)
json.dump([text for _, text in counted.texts], sys.stdout)
"""

#: How many elements a program of Inductor's kernels takes in each direction; any powers of two will do.
BLOCKS = {"XBLOCK": 8, "YBLOCK": 32, "R0_BLOCK": 256, "RSPLIT_SIZE": 64, "NUM_STAGES": 1}


@pytest.mark.parametrize("policy", exhaustive(FP8, always=()))
def test_the_generated_kernels_compile_for_an_h100(policy: str, layer: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", GENERATE, str(layer), policy]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: text for module in json.loads(printed) for name, text in kernels(module)}
    assert any("float8" in text or "fp8" in text for text in found.values())
    for name, text in found.items():
        assert machine_code(name, text, tmp_path), name


def kernels(module: str) -> list[tuple[str, str]]:
    """Names and sources of the Triton kernels of a generated module."""
    return re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", module, re.DOTALL)


def machine_code(name: str, text: str, folder: Path) -> bytes:
    """The kernel as Inductor would compile it for compute capability 9.0."""
    triton = pytest.importorskip("triton", reason="machine code needs triton's compiler")
    from machine_code import TARGETS
    from torch._inductor.runtime import triton_helpers, triton_heuristics
    from triton.compiler import ASTSource

    said: dict[str, Any] = {}

    def remember(*_: Any, **given: Any) -> Callable[[Any], Any]:
        said.update(given["triton_meta"])
        return lambda function: function

    path = folder / f"{name}.py"
    scope: dict[str, Any] = {"__file__": str(path), "__name__": name}
    path.write_text(text)
    decorators = dict.fromkeys(("pointwise", "reduction", "persistent_reduction"), remember)
    absent = patch.object(triton_helpers, "set_driver_to_gpu", lambda: None)
    with absent, patch.multiple(triton_heuristics, **decorators):
        exec(compile(text, str(path), "exec"), scope)
    function = scope[name]
    blocks = {each: BLOCKS[each] for each in function.arg_names if each in BLOCKS}
    constants = {(function.arg_names.index(each),): size for each, size in blocks.items()}
    signature = said["signature"] | dict.fromkeys(blocks, "constexpr")
    source = ASTSource(function, signature, constexprs=constants)
    made = triton.compile(source, target=TARGETS["sm_90"], options={"enable_fp_fusion": True})
    code: bytes = made.asm["cubin"]
    return code
