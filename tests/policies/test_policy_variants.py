"""The shipped variants: each loads, departs from autocast where it says so alone, and has the effect it promises."""

from collections.abc import Callable
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from support.checks.exhaustive import exhaustive
from torch import Tensor, nn

import fxamp
from fxamp.errors import PolicyError
from fxamp.graph import op_name
from fxamp.policy import Category, Policy, Site, TensorFacts, variant_names
from fxamp.tools.bench.models import build


@pytest.mark.parametrize("name", variant_names())
def test_a_variant_extends_the_policy_that_it_is_named_after(name: str) -> None:
    device, dtype, _ = name.split("-", 2)
    loaded, exact = Policy.load(name), Policy.load(f"{device}-{dtype}")
    assert (loaded.name, loaded.device, loaded.lower_precision_fp) == (name, device, dtype)
    assert [rule for rule in loaded.rules if rule not in exact.rules]
    assert all(rule.why.endswith(".") for rule in loaded.rules)
    assert {rule.id for rule in exact.rules} <= {rule.id for rule in loaded.rules}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_cuda_norms_are_lowered(dtype: str) -> None:
    exact, fast = (Policy.load(f"cuda-{dtype}{end}").resolve("cuda") for end in ("", "-fast-norms"))
    for op in ("layer_norm", "group_norm", "rms_norm"):
        before, after = exact.rule_for(f"aten::{op}"), fast.rule_for(f"aten::{op}")
        assert before is None or before.cast is Category.FP32
        assert after is not None and after.cast is Category.LOWER_PRECISION_FP


@pytest.mark.parametrize(("variant", "rows"), [("lean", 2048), ("leanest", 1024)])
def test_lean_cuts_large_logits_into_chunks_and_drops_no_result(variant: str, rows: int) -> None:
    for family in ("cuda-bfloat16", "cuda-float16", "cpu-bfloat16", "cpu-float16"):
        policy = Policy.load(f"{family}-{variant}")
        of_loss = [policy.ruling(Site("aten::cross_entropy_loss", region="loss", elements=n)).rule for n in (2**24, 10)]
        assert of_loss[0] is not None and of_loss[0].chunks == rows and of_loss[1] is None
        assert not policy.has_rules_for("results")


class Residual(nn.Module):
    """A norm whose input is float32 under autocast: a sum of a float32 and a bfloat16 value."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(4096, 4096), nn.LayerNorm(4096)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.body(x))


def norm_dtypes(module: torch.fx.GraphModule) -> list[torch.dtype]:
    (node,) = [node for node in module.graph.nodes if op_name(node) == "aten::layer_norm.default"]
    return [source.meta["val"].dtype for source in node.all_input_nodes]


def test_fast_norms_read_16_bits_and_keep_statistics_in_float32() -> None:
    model = Residual()
    with torch.no_grad():
        model.body.weight.zero_()
    # 1000 + small: a mean or variance in bfloat16, of 8 bits, would be off by a multiple of what is to be normed.
    x = (1000 + 8 * torch.randint(-4, 5, (2, 4096))).bfloat16().float()
    exact = fxamp.rewrite(model, (x,), policy="cpu-bfloat16")
    fast = fxamp.rewrite(model, (x,), policy="cpu-bfloat16-fast-norms")
    assert norm_dtypes(exact) == [torch.float32] * 3
    assert norm_dtypes(fast) == [torch.bfloat16, torch.float32, torch.float32]
    summed = (x + model.body.bias.bfloat16()).bfloat16().double()
    exact_norm = nn.functional.layer_norm(summed, (4096,))
    got = fast(x)
    assert got.dtype is torch.bfloat16
    # The statistics are right to float32; only the result is rounded, to half a unit in bfloat16's last place.
    assert (got.double() - exact_norm).abs().max() <= 2**-8 * exact_norm.abs().max()


class Stream(nn.Module):
    """Blocks that add to a stream, whose start is float32; a loss that tells small differences."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_fast_stream_is_in_16_bits_and_errs_at_most_twice_as_much(dtype: str) -> None:
    """Gradients of all parameters, against float64."""
    model, x, weight = Stream(), torch.randn(2, 8, 64), torch.randn(2, 8, 64)
    exact = deepcopy(model).double()
    reference = torch.autograd.grad((exact(x.double()) * weight).sum(), list(exact.parameters()))
    errors = {}
    for end in ("", "-fast"):
        function = fxamp.rewrite(model, (x,), policy=f"cpu-{dtype}{end}")
        output = function(x)
        assert output.dtype is (getattr(torch, dtype) if end else torch.float32)
        got = torch.autograd.grad((output.float() * weight).sum(), list(model.parameters()))
        off = [(ours.double() - theirs).square().sum() for ours, theirs in zip(got, reference, strict=True)]
        errors[end] = float(sum(off, torch.zeros(())).sqrt())
    assert errors["-fast"] <= 2 * errors[""]


def test_the_fast_variant_keeps_a_router_s_close_decision() -> None:
    """Two tokens are 3e-4 apart for an expert, less than float16 resolves: one in the place of the other is an error
    of 3 %. So it is where the router reads 16-bit norms in 16 bits, and not where it computes in float32."""
    model, (batch,) = build("moe-tiny", "tiny", seed=1, batches=1)
    exact = deepcopy(model).double()
    exact(batch["inputs"].double(), batch["targets"]).backward()

    def error(policy: str | None) -> float:
        module = model if policy is None else fxamp.rewrite(model, tuple(batch.values()), policy=policy)
        with torch.autocast("cpu", torch.float16, enabled=policy is None):
            got = torch.autograd.grad(module(*batch.values()), list(model.parameters()))
        off = [(g.double() - p.grad).square().sum() for g, p in zip(got, exact.parameters(), strict=True)]  # type: ignore[operator]
        whole = [p.grad.square().sum() for p in exact.parameters()]  # type: ignore[union-attr]
        return float((sum(off, torch.zeros(())) / sum(whole, torch.zeros(()))).sqrt())

    autocast = error(None)
    assert error("cpu-float16-fast") <= 2 * autocast
    assert error("cpu-float16-fast-norms") > 10 * autocast, "the example must be one where the decision is close"


class Positions(nn.Module):
    """A function of positions in 32 channels, up to 256 in the first one, as in rotary embeddings."""

    def __init__(self, function: Callable[[Tensor], Tensor], sign: float | nn.Parameter) -> None:
        super().__init__()
        self.body, self.function, self.sign = nn.Linear(32, 32), function, sign

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(1, x.shape[1] + 1, dtype=torch.float32)
        half = torch.outer(positions, self.sign * 10000.0 ** -(torch.arange(16) / 16))
        table = torch.cat([half, half], -1)
        y = self.body(x)
        turned = torch.cat([-y[..., 16:], y[..., :16]], -1)
        product: Tensor = y * self.function(table) + turned * self.function(table.detach())
        return product.mul(x).sum()


def _late(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``function`` of what another op has read before."""
    return lambda table: function(3 - table)


POSITIONS = [
    *((torch.cos, 1), (torch.exp, -1), (torch.log, 1), (torch.rsqrt, 1)),
    *((_late(torch.exp), 1), (_late(torch.log), -1), (_late(torch.rsqrt), -1), (_late(torch.sigmoid), 1)),
]


@pytest.mark.parametrize("case", exhaustive(POSITIONS, always=POSITIONS[:1] + POSITIONS[5:6]))
def test_positions_are_not_kept_in_8_bits(case: tuple[Callable[[Tensor], Tensor], int]) -> None:
    kept, autocast = errors_of_lean(Positions(*case))
    assert kept <= 2 * autocast, (kept, autocast)


def test_angles_with_a_gradient_are_not_kept_in_8_bits() -> None:
    """Learned frequencies: what is steep is seen by the ops that read it."""
    kept, autocast = errors_of_lean(Positions(torch.cos, nn.Parameter(torch.ones(()))))
    assert kept <= 2 * autocast, (kept, autocast)


class Multiplied(nn.Module):
    """Products of the results of a layer, each of which is near 1."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(32, 128)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = (1 + 0.05 * self.body(x).float()).prod(-1).square().mean()
        return result


def test_the_factors_of_a_product_are_not_kept_in_8_bits() -> None:
    """The errors of all factors add up in the product that the backward divides."""
    kept, autocast = errors_of_lean(Multiplied())
    assert kept <= 2 * autocast, (kept, autocast)


class Headed(nn.Module):
    """A layer, then a head with a smooth activation, under its usual name or another one."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.body, self.name = nn.Linear(32, 32), name
        self.add_module(name, nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.get_submodule(self.name)(self.body(x)).mul(x).sum()
        return result


@pytest.mark.parametrize("name", exhaustive(["cls", "lm_head", "vocab_transform"], always=["cls"]))
def test_what_the_activation_of_a_head_reads_is_not_kept_in_8_bits(name: str) -> None:
    """So the gradients of all that is below the head are autocast's."""
    kept, autocast = errors_of_lean(Headed(name))
    assert kept == autocast
    kept, autocast = errors_of_lean(Headed("layer"))
    assert kept > autocast, "the example must be one where 8 bits matter"


def errors_of_lean(model: nn.Module) -> tuple[float, float]:
    """The error of the gradients of the body, as one vector, under lean and without."""
    torch.manual_seed(0)
    x = torch.randn(1, 256, 32)

    def gradients(policy: str | None) -> Tensor:
        own = deepcopy(model).double() if policy is None else deepcopy(model)
        options = {"policy": policy, "lowering": "aot_eager"}
        run = own if policy is None else torch.compile(own, backend="fxamp", options=options)
        run(x.double() if policy is None else x).backward()
        values = [p.grad.double().flatten() for p in own.body.parameters() if p.grad is not None]
        assert len(values) == 2
        return torch.cat(values)

    exact = gradients(None)
    kept, autocast = (float((gradients(f"cpu-bfloat16{end}") - exact).norm()) for end in ("-lean", ""))
    return kept, autocast


def test_small_sums_stay_as_they_are() -> None:
    """What a norm written by hand adds, a variance and an epsilon, is no residual stream."""

    def program(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        variance = x.float().square().mean(-1, keepdim=True)
        return variance + y.float().square().mean(-1, keepdim=True), variance + 1e-6, x + y

    inputs = torch.randn(2, 8, 64), torch.randn(2, 8, 64)
    outputs = fxamp.rewrite(program, inputs, policy="cpu-bfloat16-fast")(*inputs)
    assert [value.dtype for value in outputs] == [torch.float32, torch.float32, torch.bfloat16]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(64, 8, bias=False), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x)
        return self.experts(x), torch.topk(logits.softmax(-1), 2).indices


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.lm_head = nn.ModuleList([Expert()]), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x, chosen = layer(x)
        return self.lm_head(x), chosen


def test_routers_and_heads_run_in_float32() -> None:
    model, x = Mixture(), torch.randn(512, 64)
    with torch.no_grad():  # close logits, as of an untrained or well balanced router
        model.layers[0].router.weight.mul_(0.01).add_(torch.randn(1, 64))
    exact, careful = (fxamp.rewrite(model, (x,), policy=f"cpu-bfloat16{end}") for end in ("", "-moe"))

    def linears(module: torch.fx.GraphModule) -> list[Any]:
        return [n.meta["val"].dtype for n in module.graph.nodes if op_name(n) == "aten::linear.default"]

    low, wide = torch.bfloat16, torch.float32
    assert linears(exact) == [low, low, low] and linears(careful) == [wide, low, wide]
    chosen = model(x)[1]
    assert torch.equal(careful(x)[1], chosen)
    assert (exact(x)[1] != chosen).any(), "the example must be one where bfloat16 picks other experts"
    assert careful(x)[0].dtype is wide and exact(x)[0].dtype is low


@pytest.mark.parametrize(
    ("module", "class_name", "wide"),
    [
        ("model.layers.3.block_sparse_moe.gate", "torch.nn.modules.linear.Linear", True),
        ("model.layers.3.mlp.gate", "torch.nn.modules.linear.Linear", True),
        ("model.layers.3.mlp.gate_proj", "torch.nn.modules.linear.Linear", False),
        ("model.layers.3.mlp.experts.0.up", "torch.nn.modules.linear.Linear", False),
        ("model.layers.0.ff", "transformers.models.gpt_oss.modeling_gpt_oss.GptOssTopKRouter", True),
        ("lm_head", "torch.nn.modules.linear.Linear", True),
    ],
)
def test_which_modules_are_routers(module: str, class_name: str, wide: bool) -> None:
    policy = Policy.load("cuda-float16-moe").resolve("cuda")
    rule = policy.ruling(Site("aten::linear.default", module, (class_name,))).rule
    assert rule is not None and (rule.cast is Category.FP32) is wide


@pytest.mark.parametrize(("variant", "recipe"), [("fp8", "tensorwise"), ("fp8-rowwise", "rowwise")])
def test_fp8_leaves_out_what_torchao_leaves_out(variant: str, recipe: str) -> None:
    utils = pytest.importorskip("torchao.float8.float8_linear_utils", exc_type=ImportError)
    in_fp8_by_torchao = utils._auto_filter_for_recipe(recipe, ["lm_head"])
    policy = Policy.load(f"cuda-bfloat16-{variant}").resolve("cuda", capability="9.0")
    in_fp8 = set()
    for columns, inner in product((16, 1000, 1024, 1040, 2048, 2064, 4096, 4112, 8192), repeat=2):
        layer = nn.Linear(inner, columns, device="meta")
        for op, name, shape in (
            ("linear.default", "weight", (columns, inner)),
            ("mm.default", "mat2", (inner, columns)),
            ("addmm.default", "mat2", (inner, columns)),
            ("matmul.default", "other", (inner, columns)),
        ):
            for module in ("layers.0.mlp", "lm_head"):
                rule = policy.ruling(Site(f"aten::{op}", module, args={name: TensorFacts("float32", shape)})).rule
                assert rule is not None and (rule.cast is Category.FP8) is in_fp8_by_torchao(layer, module)
                in_fp8.add(rule.recipe)
    assert in_fp8 == {"", recipe}


@pytest.mark.parametrize("recipe", ["mxfp8 rceil", "nvfp4 pretraining"])
def test_blocks_are_for_gpus_that_have_them(recipe: str) -> None:
    cast = recipe.split()[0]
    policy = Policy.load(f"cuda-bfloat16-{cast}")
    with pytest.raises(PolicyError, match=r"needs compute capability >=10\.0, but this device has 9\.0"):
        policy.resolve("cuda", capability="9.0")
    with pytest.raises(PolicyError, match=rf"products in {cast}, .* but this one is AMD's gfx950"):
        policy.resolve("cuda", arch="gfx950")
    inner = {"linear.default": "weight", "mm.default": "mat2", "addmm.default": "mat2", "matmul": "other"}
    for op, name in inner.items():
        site = Site(f"aten::{op}", "layers.0.mlp", args={name: TensorFacts("float32", (8192, 8192))})
        rule = policy.resolve("cuda", capability="10.0").ruling(site).rule
        assert rule is not None and rule.asks == recipe


def test_fp8_is_for_gpus_that_have_it() -> None:
    with pytest.raises(PolicyError, match=r"needs compute capability >=8\.9, but this device has 8\.0"):
        Policy.load("cuda-bfloat16-fp8").resolve("cuda", capability="8.0")
