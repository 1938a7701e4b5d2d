"""What products in fp8 cost on a GPU by the count, and that the kernels which Inductor generates for them compile."""

from pathlib import Path

import pytest
from support.checks.cost_counting import Counting
from support.checks.exhaustive import exhaustive
from support.machines.inductor_code import generated, kernels, machine_code

from fxamp.tools.bench.cost.count import Count
from fxamp.tools.bench.cost.rates import Rates
from fxamp.tools.bench.cost.row import row
from fxamp.tools.bench.cost.workload import Way, Workload
from fxamp.tools.bench.models import MODELS

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
#: One product of it: those of 4 bits have twice as many kernels as others, which take minutes to compile.
PRODUCT = """
import torch
from torch import nn

class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Linear(14336, 4096, bias=False)

    def forward(self, x):
        return self.down(nn.functional.silu(x)).float().square().mean()

model, inputs = Product(), (torch.zeros(8192, 14336, dtype=torch.bfloat16, requires_grad=True),)
"""
WEIGHT = 4096 * 14336
FP8 = ("cuda-bfloat16-fp8", "cuda-bfloat16-fp8-rowwise", "cuda-bfloat16-mxfp8", "cuda-bfloat16-nvfp4")


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
    assert {dtype.partition("_")[0] for dtype in flops} == {"float4" if policy == FP8[-1] else "float8"}
    assert sum(flops.values()) == sum(plain.flops.values()) == 3 * 3 * 2 * 8192 * WEIGHT
    packed = policy == FP8[-1]
    weights = {(2048, 14336), (4096, 7168)} if packed else {(4096, 14336)}
    narrow = ("uint8", "float4_e2m1fn_x2") if packed else ("float8_e4m3fn", "float8_e5m2")
    assert not weights & {tuple(sorted(value.shape)) for value in counted[policy].kept if value.dtype in narrow}
    assert counted[policy].kept_bytes < plain.kept_bytes


@pytest.mark.exhaustive
def test_gpt2_takes_no_longer(counting: Counting) -> None:
    sizes = dict(MODELS["gpt2-124m"].sizes["full"]) | {"layers": 1}
    workload = Workload("gpt2-124m", dtype="bfloat16", sizes=sizes)
    plain, *others = (milliseconds(counting(workload, Way(policy))) for policy in ("cuda-bfloat16", *FP8))
    assert all(time <= plain for time in others)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("policy", "share"), [(FP8[2], 0.75), (FP8[3], 0.62)])
def test_blocks_save_more_on_a_b200(counted: dict[str, Count], policy: str, share: float) -> None:
    """Of the data sheet's 8 TB/s and 2,250 TFLOPS, the shares that the count takes for an H100."""
    rates = Rates(0.9 * 8.0e12, 0.61 * 2250e12)
    blocks, plain = (row("", "", counted[name]).milliseconds(rates) for name in (policy, "cuda-bfloat16"))
    assert blocks <= share * plain


GENERATED = [*zip(FP8, ("sm_90", "sm_90", "sm_100", "sm_100"), strict=True), *((name, "gfx942") for name in FP8[:2])]


@pytest.mark.parametrize("target", exhaustive(GENERATED, always=()))
def test_the_generated_kernels_compile(target: tuple[str, str], layer: Path, tmp_path: Path) -> None:
    policy, gpu = target
    of_amd, packed = gpu.startswith("gfx"), policy == FP8[-1]
    if packed:
        layer = tmp_path / "product.py"
        layer.write_text(PRODUCT)
    modules = generated(layer, policy, arch=gpu) if of_amd else generated(layer, policy, int(gpu.removeprefix("sm_")))
    assert sum(module.count("extern_kernels._scaled_mm(") for module in modules) == (3 if packed else 3 * 3)
    texts = {name: text for module in modules for name, text in kernels(module)}
    assert any("float8" in text or "fp8" in text for text in texts.values())
    assert any("float8e4b8" in text for text in texts.values()) is of_amd
    assert not (of_amd and any("float8e4nv" in text for text in texts.values()))
    assert not packed or any("float4" in module for module in modules)
    for name, text in texts.items():
        assert machine_code(name, text, tmp_path, gpu), name
