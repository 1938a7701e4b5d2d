"""What a layer of experts costs on a B200 by the count, and that its generated kernels compile."""

from pathlib import Path

import pytest
from support.checks.cost_counting import Counting
from support.checks.exhaustive import exhaustive
from support.machines.inductor_code import generated, kernels, machine_code

from fxamp.tools.bench.cost.count import Count
from fxamp.tools.bench.cost.row import row
from fxamp.tools.bench.cost.workload import Way, Workload
from fxamp.tools.policy.fit.gpus import GPUS

#: DeepSeek-V3's routed experts, eight on each GPU of an expert-parallel group, for the rows that its all-to-all brings.
LAYER = """
import torch
from torch import nn
from torch.nn import functional as F

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.zeros(8, 2048, 7168)) for _ in range(2))
        self.down = nn.Parameter(torch.zeros(8, 7168, 2048))

    def product(self, rows, weight, ends):
        return F.grouped_mm(rows, weight.bfloat16().transpose(1, 2), offs=ends)

    def forward(self, rows, scores, ends):
        hidden = F.silu(self.product(rows, self.gate, ends)) * self.product(rows, self.up, ends)
        return self.product(hidden, self.down, ends) * scores.unsqueeze(1)

rows, scores = (torch.zeros(65536, *size, dtype=torch.bfloat16, requires_grad=True) for size in ((7168,), ()))
model, inputs = Experts(), (rows, scores, 8192 * torch.arange(1, 9, dtype=torch.int32))
"""
#: DeepSeek-V3's whole layer of experts for 8,192 tokens, each of which goes to eight experts, and to a shared one.
WHOLE = """
import torch
from torch import nn
from torch.nn import functional as F

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.RMSNorm(7168), nn.Linear(7168, 8, bias=False)
        self.gate, self.up = (nn.Parameter(torch.zeros(8, 2048, 7168)) for _ in range(2))
        self.down = nn.Parameter(torch.zeros(8, 7168, 2048))
        self.shared = nn.ModuleList(nn.Linear(*size, bias=False) for size in [(7168, 2048)] * 2 + [(2048, 7168)])

    def product(self, rows, weight, ends):
        return F.grouped_mm(rows, weight.bfloat16().transpose(1, 2), offs=ends)

    def routed(self, x):
        scores, chosen = torch.topk(self.router(x).float().sigmoid(), 8)
        order = chosen.flatten().argsort(stable=True)
        ends = torch.histc(chosen.flatten().float(), 8, 0, 7).cumsum(0).int()
        rows = x[order // 8]
        hidden = F.silu(self.product(rows, self.gate, ends)) * self.product(rows, self.up, ends)
        out = self.product(hidden, self.down, ends) * scores.flatten()[order].unsqueeze(1).to(x.dtype)
        return out[order.argsort()].view(len(x), 8, -1).sum(1)

    def forward(self, x):
        y = self.norm(x).bfloat16()
        gate, up, down = self.shared
        return x + self.routed(y) + down(F.silu(gate(y)) * up(y))

model, inputs = Layer(), (torch.zeros(8192, 7168, dtype=torch.bfloat16, requires_grad=True),)
"""
ROWS, WEIGHT = 65536, 7168 * 2048
IN_8_BITS = ("cuda-bfloat16-mxfp8-moe", "cuda-bfloat16-fp8-rowwise-moe")


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layer") / "experts.py"
    path.write_text(LAYER)
    return path


@pytest.fixture(scope="module")
def counted(layer: Path, counting: Counting) -> dict[str, Count]:
    workload = Workload(str(layer), dtype="bfloat16", optimizer="none")
    return {policy: counting(workload, Way(policy)) for policy in ("cuda-bfloat16-moe", *IN_8_BITS)}


@pytest.mark.exhaustive
def test_mxfp8_takes_at_most_seven_tenths_on_a_b200(counted: dict[str, Count]) -> None:
    times = {policy: row("", "", count).milliseconds(GPUS["b200"].rates) for policy, count in counted.items()}
    assert times["cuda-bfloat16-mxfp8-moe"] <= 0.70 * times["cuda-bfloat16-moe"]


@pytest.mark.exhaustive
def test_mxfp8_pays_in_a_whole_layer_with_a_router_and_a_shared_expert(counting: Counting, tmp_path: Path) -> None:
    path = tmp_path / "whole.py"
    path.write_text(WHOLE)
    workload = Workload(str(path), dtype="bfloat16", optimizer="none")
    counts = (counting(workload, Way(policy)) for policy in (IN_8_BITS[0], "cuda-bfloat16-moe"))
    blocks, plain = (row("", "", count).milliseconds(GPUS["b200"].rates) for count in counts)
    assert blocks <= 0.70 * plain


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", IN_8_BITS)
def test_rows_that_two_products_read_are_written_once(counted: dict[str, Count], policy: str) -> None:
    """Those of gate and up in the forward; Inductor would write them for each product. Padded rows have other sizes."""
    forward = [kernel for kernel in counted[policy].kernels if kernel.stage == "forward" and kernel.kind == "triton"]
    bytes_of = [access.bytes for kernel in forward for access in kernel.writes if access.dtype == "float8_e4m3fn"]
    assert bytes_of.count(ROWS * 7168) == bytes_of.count(ROWS * 2048) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", IN_8_BITS)
def test_the_padding_is_counted_and_no_weight_is_kept_in_8_bits(counted: dict[str, Count], policy: str) -> None:
    """The weights' gradients sum over padded rows; there is room for the most that eight groups need."""
    flops, plain = counted[policy].flops, counted["cuda-bfloat16-moe"].flops
    padding = 8 * (32 if "mxfp8" in policy else 16)
    assert plain["bfloat16"] == 3 * 3 * 2 * ROWS * WEIGHT
    assert flops["float8_e4m3fn"] == plain["bfloat16"] + 3 * 2 * padding * WEIGHT and "bfloat16" not in flops
    kept = {tuple(sorted(value.shape)) for value in counted[policy].kept if value.dtype.startswith("float8")}
    assert not kept & {(8, 2048, 7168), (8 * 2048, 7168), (2048, 8 * 7168)}
    assert counted[policy].kept_bytes < counted["cuda-bfloat16-moe"].kept_bytes


GENERATED = list(zip(IN_8_BITS, (100, 90), strict=True))


@pytest.mark.parametrize("target", exhaustive(GENERATED, always=()))
def test_the_generated_kernels_compile(target: tuple[str, int], layer: Path, tmp_path: Path) -> None:
    policy, capability = target
    modules = generated(layer, policy, capability)
    assert sum(module.count("torch.ops.fxamp.scaled_grouped_mm.default(") for module in modules) == 3 * 3
    texts = {name: text for module in modules for name, text in kernels(module)}
    assert any("float8" in text or "fp8" in text for text in texts.values())
    for name, text in texts.items():
        assert machine_code(name, text, tmp_path, f"sm_{capability}"), name
