"""split-linear-losses: torch's own chunked loss under a policy, and beside fxamp's."""

import copy
import warnings
from typing import Any

import pytest
import torch
from bench_graph import Workbench, policy, workbench
from torch import Tensor, nn
from torch.nn import functional as F

import fxamp
from fxamp.graph import all_nodes, op_name
from fxamp.passes.forward.annotate_rules import AnnotateRules
from fxamp.passes.forward.chunk_losses import CHUNKED, ChunkLosses
from fxamp.passes.forward.expand_composites import ExpandComposites
from fxamp.passes.forward.insert_casts import InsertCasts
from fxamp.passes.forward.split_linear_losses import SplitLinearLosses
from fxamp.policy import Category, Policy, Rule

pytestmark = pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="this torch has no chunked loss of its own"
)

WIDTH, CLASSES, ROWS = 16, 48, 64
RULES = (
    Rule("products", Category.LOWER_PRECISION_FP, ("linear",)),
    Rule("softmax", Category.FP32, ("log_softmax", "nll_loss_nd")),
)


class Net(nn.Module):
    """A head whose loss torch cuts into chunks; ``whole`` calls the same function without."""

    def __init__(self, repeated: bool = True, chunked: bool = True, rows: int = 16, **form: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.form = nn.Linear(WIDTH, CLASSES), form
        if chunked:
            options = nn.LinearCrossEntropyOptions(batch_chunk_size=rows, allow_retain_graph=repeated)
            self.form = {**form, "options": options}

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        bias = self.head.bias
        return F.linear_cross_entropy(x, self.head.weight, target, linear_bias=bias, **self.form)


FORMS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum", "ignore_index": 3},
    "none": {"reduction": "none"},
    "weighted": {"weight": torch.arange(1.0, CLASSES + 1)},
}


def inputs(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=generator), torch.randint(CLASSES, (rows,), generator=generator)


def bench_of(module: nn.Module, dtype: torch.dtype = torch.float32) -> Workbench:
    x, target = inputs()
    return workbench(module, x.to(dtype), target, under=policy(*RULES))


def test_a_layer_and_its_loss() -> None:
    bench = bench_of(Net())
    assert bench.golden("split-linear-losses", SplitLinearLosses()).modified == 1
    bench.run(ExpandComposites(), AnnotateRules(), InsertCasts())
    assert bench.run(ChunkLosses()).modified == 1
    (call,) = (node for node in all_nodes(bench.captured.module) if node.target is CHUNKED)
    assert call.args[8:10] == (torch.bfloat16, 4)


@pytest.mark.parametrize(
    "bench", [lambda: bench_of(Net().double(), torch.float64), lambda: bench_of(Net(chunked=False))]
)
def test_float64_and_the_whole_loss_stay(bench: Any) -> None:
    graph = bench()
    before = graph.text
    assert graph.run(SplitLinearLosses()).modified == 0 and graph.text == before


def test_a_rule_of_the_policy_comes_before_the_wish_of_the_program() -> None:
    x, target = inputs()
    cut = Rule("cut", ops=("cross_entropy_loss",), chunks=32)
    bench = workbench(Net(), x, target, under=policy(*RULES, cut))
    bench.run(SplitLinearLosses(), ExpandComposites(), AnnotateRules(), InsertCasts(), ChunkLosses())
    (call,) = (node for node in all_nodes(bench.captured.module) if op_name(node).startswith("fxamp::"))
    assert call.args[9] == 2


def outcome(run: Any, module: nn.Module, x: Tensor, target: Tensor, scale: float = 1.0) -> list[Tensor]:
    """Loss and gradients in float64."""
    module.zero_grad()
    rows = x.clone().requires_grad_()
    loss = run(rows, target)
    (loss.float() * torch.arange(1.0, 1 + loss.numel()).view_as(loss)).sum().mul(scale).backward()
    gradients = [tensor.grad for tensor in (rows, *module.parameters()) if tensor.grad is not None]
    assert len(gradients) == 3
    return [loss.detach().double(), *(gradient.double() / scale for gradient in gradients)]


def ours(module: nn.Module, x: Tensor, target: Tensor, rules: Policy, **options: Any) -> list[Tensor]:
    torch._dynamo.reset()
    settings = {"policy": rules, "lowering": "aot_eager", **options}
    return outcome(torch.compile(module, backend="fxamp", options=settings), module, x, target)


def in_float64(form: dict[str, Any], x: Tensor, target: Tensor) -> list[Tensor]:
    weight = form.get("weight")
    module = Net(chunked=False, **(form if weight is None else {**form, "weight": weight.double()})).double()
    return outcome(module, module, x.double(), target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_the_error_is_at_most_that_of_autocast_beside_torchs_own_op(form: str, dtype: torch.dtype) -> None:
    """torch's op reads activations in 16 bits and weights in float32, and rounds less on a CPU than autocast does."""
    x, target = inputs()
    x, name = x.to(dtype).float(), str(dtype).removeprefix("torch.")
    rules = policy(*RULES, dtype=name) if dtype.itemsize == 2 else policy(RULES[1])
    chunked = ours(Net(**FORMS[form]), x, target, rules)
    module, whole = Net(**FORMS[form]), Net(chunked=False, **FORMS[form])
    torchs = outcome(lambda rows, target: module(rows.to(dtype), target), module, x, target)
    with torch.autocast("cpu", dtype if dtype.itemsize == 2 else torch.bfloat16, enabled=dtype.itemsize == 2):
        autocast = outcome(whole, whole, x, target)
    for one, other, bound, exact in zip(chunked, torchs, autocast, in_float64(FORMS[form], x, target), strict=True):
        assert (one - exact).norm() <= 2**0.5 * (bound - exact).norm() + 1e-6 * exact.norm()
        assert (one - other).norm() <= 4 * torch.finfo(dtype).eps * exact.norm()


def test_a_loss_scale_keeps_gradients_that_torchs_own_op_loses_in_float16() -> None:
    """The mean over many rows makes gradients below the least of float16, which torch rounds before it scales them."""
    x, target = inputs(1 << 11)
    x, target = x.half().float(), target % 2
    scaler = fxamp.GradScaler("cpu", init_scale=2.0**16)
    net = Net(rows=512)
    net.head.weight.data /= 10000
    torch._dynamo.reset()
    settings = {"policy": policy(*RULES, dtype="float16"), "lowering": "aot_eager", "scaler": scaler}
    net.compile(backend="fxamp", options=settings)
    rows = x.clone().requires_grad_()
    scaler.scale(net(rows, target)).backward()
    exact, plain = copy.deepcopy(net).double(), Net(rows=512)
    exact.form = {}
    plain.load_state_dict(net.state_dict())
    truth = outcome(exact, exact, x.double(), target)[1]
    theirs = outcome(lambda rows, target: plain(rows.half(), target), plain, x, target, 2.0**16)[1]
    assert rows.grad is not None
    assert (rows.grad.double() - truth).norm() <= 2**-8 * truth.norm() < 2**-3 * truth.norm() < (theirs - truth).norm()


def test_where_the_graph_breaks_at_torchs_op_it_runs_in_float32() -> None:
    """Without allow_retain_graph torch warns while Dynamo traces, which ends the graph; nothing is cast there."""
    x, target = inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chunked = ours(Net(repeated=False), x, target, policy(*RULES))
    for one, exact in zip(chunked, in_float64({}, x, target), strict=True):
        torch.testing.assert_close(one, exact, rtol=1e-5, atol=1e-5)
