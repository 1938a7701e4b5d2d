"""scale-linear-losses: torch's own chunked loss under a policy, and compared with fxamp's."""

import copy
import warnings
from typing import Any

import pytest
import torch
from support.checks.bench_graph import Workbench, policy, workbench
from support.checks.exhaustive import each_once
from support.machines.lacks import needs_chunked_loss
from torch import Tensor, nn
from torch.nn import functional as F

import fxamp
from fxamp.kernels.linear_cross_entropy import CHUNKED
from fxamp.passes.forward.annotate_rules import AnnotateRules
from fxamp.passes.forward.expand_composites import ExpandComposites
from fxamp.passes.forward.insert_casts import InsertCasts
from fxamp.passes.forward.scale_linear_losses import ScaleLinearLosses
from fxamp.policy import Category, Policy, Rule

pytestmark = needs_chunked_loss

WIDTH, CLASSES, ROWS = 16, 48, 64
RULES = (
    Rule("products", Category.LOWER_PRECISION_FP, ("linear",)),
    Rule("softmax", Category.FP32, ("log_softmax", "nll_loss_nd")),
)


class Net(nn.Module):
    """A head whose loss torch cuts into chunks; ``whole`` calls the same function without."""

    def __init__(
        self, repeated: bool = True, chunked: bool = True, rows: int = 16, weighted: bool = False, **form: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.form = nn.Linear(WIDTH, CLASSES), form
        self.register_buffer("weight", torch.arange(1.0, CLASSES + 1) if weighted else None)
        if chunked:
            options = nn.LinearCrossEntropyOptions(batch_chunk_size=rows, allow_retain_graph=repeated)
            self.form = {**form, "options": options}

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        bias = self.head.bias
        return F.linear_cross_entropy(x, self.head.weight, target, linear_bias=bias, weight=self.weight, **self.form)


FORMS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum", "ignore_index": 3},
    "none": {"reduction": "none"},
    "weighted": {"weighted": True},
}


def inputs(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=generator), torch.randint(CLASSES, (rows,), generator=generator)


def bench_of(module: nn.Module, dtype: str = "float16") -> Workbench:
    """``module`` after a layer, whose result is in 16 bits under the autocast around it."""
    x, target = inputs()
    ambient = getattr(torch, dtype)
    bench = workbench(nn_pair(module), x, target, under=policy(*RULES, dtype=dtype), ambient=ambient)
    bench.run(ExpandComposites(), AnnotateRules(), InsertCasts())
    return bench


def nn_pair(head: nn.Module) -> nn.Module:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(WIDTH, WIDTH), head

        def forward(self, x: Tensor, target: Tensor) -> Any:
            return self.head(self.body(x), target)

    return Pair()


def test_torchs_loss_in_float16() -> None:
    bench = bench_of(Net())
    assert bench.golden("scale-linear-losses", ScaleLinearLosses()).modified == 1


@pytest.mark.parametrize(
    "form, dtype", [({}, "bfloat16"), ({"chunked": False}, "float16"), ({"reduction": "none"}, "float16")]
)
def test_what_loses_nothing_stays(form: dict[str, Any], dtype: str) -> None:
    bench_of(Net(**form), dtype).assert_unchanged_by(ScaleLinearLosses())


def outcome(run: Any, module: nn.Module, x: Tensor, target: Tensor, scale: float = 1.0) -> list[Tensor]:
    """Loss and gradients in float64."""
    module.zero_grad()
    rows = x.clone().requires_grad_()
    loss = run(rows, target)
    (loss.float() * torch.arange(1.0, 1 + loss.numel()).view_as(loss)).sum().mul(scale).backward()
    gradients = [tensor.grad for tensor in (rows, *module.parameters()) if tensor.grad is not None]
    assert len(gradients) == 1 + len([*module.parameters()])
    return [loss.detach().double(), *(gradient.double() / scale for gradient in gradients)]


def ours(module: nn.Module, x: Tensor, target: Tensor, rules: Policy | str, **options: Any) -> list[Tensor]:
    torch._dynamo.reset()
    settings = {"policy": rules, "lowering": "aot_eager", **options}
    return outcome(torch.compile(module, backend="fxamp", options=settings), module, x, target)


@each_once("form, dtype, named", FORMS, [torch.bfloat16, torch.float16], [False, True])
def test_it_computes_as_torchs_under_autocast(form: str, dtype: torch.dtype, named: bool) -> None:
    """Under autocast in bfloat16 bit for bit; else with an error of at most autocast's whole loss.

    Under a ``named`` policy it computes in float32, which it was captured in.
    """
    x, target = inputs()
    module, whole = nn_pair(Net(**FORMS[form])), nn_pair(Net(chunked=False, **FORMS[form]))
    whole.load_state_dict(module.state_dict())
    rules = policy(*RULES, dtype=str(dtype).removeprefix("torch."))
    with torch.autocast("cpu", dtype, enabled=not named):
        result = ours(module, x, target, rules if named else "auto")
    exact = outcome(double := copy.deepcopy(whole).double(), double, x.double(), target)
    with torch.autocast("cpu", dtype):
        torchs, autocast = (outcome(net, net, x, target) for net in (module, whole))
    for one, other, bound, truth in zip(result, torchs, autocast, exact, strict=True):
        if not named and (dtype is torch.bfloat16 or form == "none"):
            assert torch.equal(one, other)
        else:
            rounding = torch.finfo(dtype).eps * truth.norm()  # of the loss, in 16 bits under autocast
            assert (one - truth).norm() <= 2**0.5 * (bound - truth).norm() + rounding


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_fxamps_chunked_loss_is_torchs_in_float32(form: str, chunks: int) -> None:
    x, target = inputs()
    net = Net(**FORMS[form])
    torchs = outcome(net, net, x, target)
    settings = FORMS[form]
    reduction = ("none", "mean", "sum").index(settings.get("reduction", "mean"))
    index = settings.get("ignore_index", -100)

    def chunked(rows: Tensor, target: Tensor) -> Tensor:
        head = rows, net.head.weight, net.head.bias, target, net.weight
        loss: Tensor = CHUNKED(*head, reduction, index, 0.0, torch.float32, chunks, "forward")
        return loss

    torch.testing.assert_close(outcome(chunked, net, x, target), torchs, rtol=1e-5, atol=1e-5)


def test_a_loss_scale_keeps_gradients_that_torchs_own_op_loses_in_float16() -> None:
    """The mean over many rows makes gradients below the least of float16, which torch rounds before it scales them."""
    x, target = inputs(1 << 11)
    net = nn_pair(Net(rows=512))
    net.head.head.weight.data /= 10000
    truth = outcome(exact := copy.deepcopy(net).double(), exact, x.double(), target % 2)
    with torch.autocast("cpu", torch.float16):
        torchs = outcome(net, net, x, target % 2, 2.0**10)
    scaler = fxamp.GradScaler("cpu", init_scale=2.0**10)
    net.zero_grad()
    torch._dynamo.reset()
    net.compile(backend="fxamp", options={"lowering": "aot_eager", "scaler": scaler})
    with torch.autocast("cpu", torch.float16):
        loss = net(x, target % 2)
    scaler.scale(loss).backward()
    ours = net.body.weight.grad
    assert ours is not None
    assert (ours.double() - truth[2]).norm() <= 2**-6 * truth[2].norm() < (torchs[2] - truth[2]).norm() / 8


def test_where_the_graph_breaks_at_torchs_op_it_runs_in_float32() -> None:
    """Without allow_retain_graph torch warns while Dynamo traces, which ends the graph; nothing is cast there."""
    x, target = inputs()
    net = Net(repeated=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chunked = ours(net, x, target, policy(*RULES))
    exact = copy.deepcopy(net).double()
    torch.testing.assert_close(chunked, outcome(exact, exact, x.double(), target), rtol=1e-5, atol=1e-5)
