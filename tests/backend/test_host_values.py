"""Values that the host keeps: gradients are the same bit for bit, however late copies are and a model is trained."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.checks.exhaustive import exhaustive
from support.machines.lacks import needs_compiler
from support.machines.late_host_copies import LateCopies, late_copies
from test_kept_programs import AnyShape, Checkpointed, Dropout
from test_kept_rules import BASE, PROGRAMS, Perceptron, X, compiled_gradients, policy, same
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.autograd.graph import saved_tensors_hooks

import fxamp
from fxamp import Policy, Rule
from fxamp.errors import OptionError
from fxamp.passes.shared.kept_packing import LEAST_SENT

AWAY = Rule("away", keep="host", region="kept", elements=">=1")  # type: ignore[arg-type]
RULES = policy(AWAY)
AOT = {"policy": RULES, "lowering": "aot_eager"}


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateCopies]:
    with late_copies(monkeypatch) as copies:
        yield copies


def restored(model: nn.Module, run: Callable[[], Any]) -> Any:
    """The result of ``run`` with the same random numbers and buffers each time."""
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    torch.manual_seed(1)
    result = run()
    model.load_state_dict(buffers, strict=False)
    return result


def require_same_gradients(late: LateCopies, model: nn.Module, x: Tensor, lowering: str = "aot_eager") -> Any:
    """Fail unless rules change no bit of loss and gradients, and all copies were right; return the report."""
    loss, plain, _ = restored(model, lambda: compiled_gradients(model, x, BASE, lowering))
    loss_again, gradients, report = restored(model, lambda: compiled_gradients(model, x, RULES, lowering))
    assert torch.equal(loss, loss_again) and same(plain, gradients) and plain
    sent = [value for graph in report.graphs for value in graph.kept if value.form == "host"]
    assert sent and late.count == 2 * len(sent) and not late.freed and not late.waiting
    assert all(value.after == 0 and value.before for value in sent)
    return report


MAKERS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    **PROGRAMS,
    "dropout": (Dropout, X),
    "checkpointed": (Checkpointed, X),
}


@pytest.mark.parametrize("program", exhaustive(MAKERS, always=["perceptron", "checkpointed"]))
def test_no_bit_of_a_gradient_changes(program: str, late: LateCopies) -> None:
    make, x = MAKERS[program]
    require_same_gradients(late, make().train(), x)
    assert late.most == 1


@needs_compiler
@pytest.mark.exhaustive
@pytest.mark.parametrize("program", PROGRAMS)
def test_no_bit_changes_under_inductor(program: str, late: LateCopies) -> None:
    """Inductor reuses memory as soon as its last reader has run, and reorders ops."""
    make, x = PROGRAMS[program]
    require_same_gradients(late, make().train(), x, "inductor")


class Masks(nn.Module):
    """Keeps booleans, integers and float32, in permuted memory."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(16, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table((x.abs() * 7).long().sum(-1) % 16).transpose(0, 1)
        return torch.where(x > 0.1, self.out(x).float(), x).sort(-1)[0].cumsum(-1).pow(2).mean()


def test_values_of_every_dtype_are_sent(late: LateCopies) -> None:
    report = require_same_gradients(late, Masks(), X)
    assert {"b8", "i64", "f32"} <= {value.dtype for value in report.graphs[-1].kept if value.form == "host"}


INDUCTOR = pytest.param("inductor", marks=[pytest.mark.exhaustive, needs_compiler])


@pytest.mark.parametrize("lowering", ["aot_eager", INDUCTOR])
def test_the_backward_runs_again(lowering: str, late: LateCopies) -> None:
    model = Perceptron()
    loss = torch.compile(model, backend="fxamp", options={**AOT, "lowering": lowering})(X)
    loss.backward(retain_graph=True)
    first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss.backward()
    assert same(first, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert same(first, compiled_gradients(model, X, BASE, lowering)[1])


def test_several_forwards_before_the_backwards(late: LateCopies) -> None:
    model, inputs = Perceptron(), [X, X * 2, X - 1]
    compiled = torch.compile(model, backend="fxamp", options=AOT)
    losses = [compiled(x) for x in inputs]
    found = [torch.autograd.grad(loss, list(model.parameters())) for loss in reversed(losses)]
    for x, gradients in zip(reversed(inputs), found, strict=True):
        _, expected, _ = compiled_gradients(model, x, BASE)
        assert same(expected, dict(zip(dict(model.named_parameters()), gradients, strict=True)))


def test_hooks_get_what_the_host_keeps(late: LateCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook reads what it is given, so the copies must be there."""
    model = Perceptron()
    compiled = torch.compile(model, backend="fxamp", options=AOT)
    with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor.clone()):
        loss = compiled(X)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert same(gradients, compiled_gradients(model, X, BASE)[1])


def test_hooks_that_are_compiled_are_refused_by_name(late: LateCopies) -> None:
    def traced(function: Callable[[Tensor], Tensor]) -> Any:
        return torch.fx.symbolic_trace(function)

    compiled = torch.compile(Perceptron(), backend="fxamp", options=AOT)
    pack, unpack = traced(lambda x: x + 0), traced(lambda x: x * 1)
    with (
        saved_tensors_hooks(pack, unpack),
        pytest.raises(BackendCompilerFailed, match=r"keep = 'host'.*saved_tensors_hooks .*Python functions"),
    ):
        compiled(X)


@pytest.mark.parametrize("dynamic", exhaustive([True, None], always=[]))
def test_shapes_may_change(dynamic: bool | None, late: LateCopies) -> None:
    model = AnyShape(fused_attention=False)
    results = []
    for rules in (BASE, RULES):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="fxamp", dynamic=dynamic, options={**AOT, "policy": rules})
        own = []
        for length in (17, 40, 23):
            model.zero_grad()
            compiled(torch.randn(3, length, 32, generator=torch.Generator().manual_seed(length))).backward()
            own.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        results.append(own)
    assert all(same(*pair) for pair in zip(*results, strict=True))
    assert late.count > 20 and not late.freed


def test_without_a_backward_nothing_is_copied(late: LateCopies) -> None:
    compiled = torch.compile(Perceptron(), backend="fxamp", options=AOT)
    with torch.no_grad():
        compiled(X)
    with torch.inference_mode():
        compiled(X)
    assert late.count == late.waiting == 0


def test_what_exists_anyway_stays(late: LateCopies) -> None:
    """Parameters, inputs, results and views of them: to copy them would save nothing."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(32))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            result = x.double() @ self.weight.double().t()
            return result, result.exp()

    model, x = Product().double(), X.double().requires_grad_()
    compiled = torch.compile(model, backend="fxamp", options=AOT)
    sum(result.sum() for result in compiled(x)).backward()
    assert late.count == 0 and not fxamp.report(compiled).graphs[-1].kept


def test_small_values_stay_unless_the_rule_has_a_size(late: LateCopies) -> None:
    rules = policy(Rule("away", keep="host", region="kept", ops=("*",)))  # type: ignore[arg-type]
    large = torch.randn(LEAST_SENT // 128, 32)
    for x, forms in ((X, {False}), (large, {True, False})):
        _, _, report = compiled_gradients(Perceptron(), x, rules)
        values = [value for value in report.graphs[-1].kept if value.rule is not None]
        assert {value.form == "host" for value in values} == forms
        small = [value for value in values if value.form != "host"]
        assert all(value.before < LEAST_SENT and f"fewer than {LEAST_SENT} bytes" in value.reason for value in small)


def test_other_values_may_be_kept_in_other_forms(late: LateCopies) -> None:
    eight = Rule("eight", keep="int8", region="kept", elements=">=1", ops=("addmm",))  # type: ignore[arg-type]
    again = Rule("again", keep="recompute", region="kept", ops=("gelu",))  # type: ignore[arg-type]
    others, together = policy(eight, again), policy(AWAY, eight, again)
    model = Perceptron()
    _, expected, _ = compiled_gradients(model, X, others)
    _, gradients, report = compiled_gradients(model, X, together)
    assert same(expected, gradients) and late.count and not late.freed
    assert {"host", "recompute", "int8/64"} <= {value.form for value in report.graphs[-1].kept}


def test_a_scaler_changes_nothing(late: LateCopies) -> None:
    model = Perceptron()
    _, plain, _ = compiled_gradients(model, X, BASE)
    _, scaled, _ = compiled_gradients(model, X, RULES, scaler=fxamp.GradScaler("cpu", init_scale=2.0**8))
    assert same(plain, scaled) and late.count


def test_exact_values_are_sent_where_autocast_is_off(late: LateCopies) -> None:
    class Off(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(32, 64)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return torch.sigmoid(torch.sigmoid(self.inner(x)) * 2).pow(2).mean()

    require_same_gradients(late, Off(), X)


def test_a_backward_that_fails_waits_for_its_copies(late: LateCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory is free then: what is allocated next would be overwritten."""
    loss = torch.compile(Perceptron(), backend="fxamp", options=AOT)(X)
    waits: list[torch.device] = []
    monkeypatch.setattr("fxamp.backend.keep_rules.await_copies_of", waits.append)
    begin, count = late._begin, []

    def fail(*arguments: Any) -> None:
        begin(*arguments)
        count.append(1)
        if len(count) == 3:
            raise MemoryError("there is no memory")

    monkeypatch.setattr("fxamp.kernels.host_memory._begin", fail)
    with pytest.raises(MemoryError):
        loss.backward()
    assert waits == [torch.device("cpu")]


def test_on_a_cpu_values_stay_where_they_are() -> None:
    model = Perceptron()
    _, plain, _ = compiled_gradients(model, X, BASE)
    _, gradients, report = compiled_gradients(model, X, RULES)
    values = [value for value in report.graphs[-1].kept if value.rule is not None]
    assert values and all(
        value.after == value.before and "in the host's memory already" in value.reason for value in values
    )
    assert same(plain, gradients)


def test_cuda_graphs_and_other_devices_are_refused_by_name() -> None:
    with pytest.raises(BackendCompilerFailed, match=r"keep = 'host' \('away'\).*CUDA graphs"):
        compiled_gradients(Perceptron(), X, RULES, "inductor", mode="reduce-overhead")
    from fxamp.backend.keep_rules import KeepRules

    for device, accepted in (("xpu", False), ("mps", False), ("cuda", True)):
        own = KeepRules(policy(AWAY, base=Policy.load(f"{device}-bfloat16")))
        if accepted:
            own.refuse("aot_eager", {})
            continue
        with pytest.raises(OptionError, match=rf"keep = 'host' .*'{device}'; accepted: 'cuda', 'cpu'"):
            own.refuse("aot_eager", {})
