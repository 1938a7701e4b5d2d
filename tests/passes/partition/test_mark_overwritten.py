"""mark-overwritten: what is computed from inputs that a graph writes to is saved, so gradients see the old values."""

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from support.checks.bench_graph import golden_pass
from support.checks.equality import assert_equal
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from fxamp.passes.base import Context
from fxamp.passes.partition.mark_overwritten import MarkOverwritten
from fxamp.policy import Policy, Rule

aten = torch.ops.aten


def joint(*backward: str) -> tuple[GraphModule, Context]:
    """A forward that writes to ``state`` and reads it through views; the ops named are in the backward."""

    def function(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        rows = aten.t.default(aten.view.default(state, [2, 8]))
        (part, _) = aten.split.Tensor(state, 2)
        later = aten.cos.default(aten.add.Tensor(aten.tanh.default(part), 1))
        out = aten.mul.Tensor(aten.exp.default(x), later.sum()), aten.sin.default(rows)
        aten.copy_.default(state, x)
        return out

    mode = FakeTensorMode()
    gm = make_fx(function)(*map(mode.from_tensor, (torch.ones(4, 4), torch.ones(4, 4))))
    for name in backward:
        (node,) = gm.graph.find_nodes(op="call_function", target=getattr(aten, name).default)
        node.meta["partitioner_tag"] = "is_backward"
    return gm, Context(mode)


def marked(gm: GraphModule) -> dict[str, CheckpointPolicy]:
    return {node.name: node.meta["recompute"] for node in gm.graph.nodes if "recompute" in node.meta}


def test_calls_that_read_overwritten_elements_are_marked_once() -> None:
    gm, context = joint()
    assert [MarkOverwritten().run(gm, context).modified for _ in range(2)] == [2, 0]
    assert marked(gm) == dict.fromkeys(("tanh", "sin"), CheckpointPolicy.MUST_SAVE), "no view"


def test_a_backward_that_reads_overwritten_elements_reads_a_copy() -> None:
    gm, context = joint("sin")
    record = golden_pass("passes/mark-overwritten", gm, context, MarkOverwritten())
    assert record.modified == 2, "a copy, and its mark"
    (clone,) = gm.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert marked(gm) == {clone.name: CheckpointPolicy.MUST_SAVE}
    assert [user.name for user in clone.users] == ["view", "split"]
    (copied,) = gm.graph.find_nodes(op="call_function", target=aten.copy_.default)
    assert copied.args[0] is clone.args[0], "the input itself is written to"


def test_marks_of_the_program_stay() -> None:
    gm, context = joint()
    (first,) = gm.graph.find_nodes(op="call_function", target=aten.sin.default)
    first.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    assert MarkOverwritten().run(gm, context).modified == 1
    assert first.meta["recompute"] is CheckpointPolicy.PREFER_RECOMPUTE


def test_where_nothing_is_written_nothing_changes() -> None:
    gm, context = joint("sin")
    (copied,) = gm.graph.find_nodes(op="call_function", target=aten.copy_.default)
    gm.graph.erase_node(copied)
    assert MarkOverwritten().run(gm, context).modified == 0


class Averaging(nn.Module):
    """Multiplies by a running average of its own activations."""

    def __init__(self, update: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.update = nn.Linear(4, 4), nn.Linear(4, 4), update
        self.average: Tensor
        self.register_buffer("average", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        seen = self.update(self.average, h)
        out: Tensor = self.last(h) * seen
        return out


def added(average: Tensor, h: Tensor) -> Tensor:
    with torch.no_grad():
        return average.mul_(0.5).add_(h.mean(0))


def detached(average: Tensor, h: Tensor) -> Tensor:
    average += h.mean(0).detach()
    return average


def old_value(average: Tensor, h: Tensor) -> Tensor:
    seen = (average.view(2, 2) * 2).view(4)
    average.copy_(h.mean(0).detach())
    return seen


def copied(average: Tensor, h: Tensor) -> Tensor:
    """Inductor's passes drop the copy, so the backward reads the buffer itself."""
    seen = average.view(2, 2).clone().view(4)
    average.copy_(h.mean(0).detach())
    return seen


def gradients(model: nn.Module, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The buffer after two steps, and the sums of their gradients."""
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        for step in range(2):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).requires_grad_()
            model(x).sum().backward()
    return [*model.buffers(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


AGAIN = Rule("again", keep="recompute", region="kept", ops=("*",))
TRACED = product([added, detached, old_value, copied], [(), (AGAIN,)], ["cpu-bfloat16", "cpu-bfloat16-lean"])
COMPILED = product([added, copied], [()], ["cpu-bfloat16-lean"])


@pytest.mark.parametrize(
    ("update", "rules", "policy", "lowering"),
    [
        *((*case, "aot_eager") for case in TRACED),
        *(pytest.param(*case, "inductor", marks=pytest.mark.inductor) for case in COMPILED),
    ],
)
def test_an_update_is_in_the_gradients_once(
    update: Callable[[Tensor, Tensor], Tensor], rules: tuple[Rule, ...], policy: str, lowering: str
) -> None:
    model = Averaging(update)
    twin = copy.deepcopy(model)
    shipped = Policy.load(policy)
    with_rules = replace(shipped, rules=(*rules, *shipped.rules))
    twin.compile(backend="fxamp", options={"policy": with_rules, "lowering": lowering})
    ours, theirs = gradients(twin), gradients(model, torch.bfloat16)
    assert len(ours) == 5
    if lowering == "aot_eager":
        assert_equal(ours, theirs)
    else:
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_gradients_of_a_graph_without_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where "auto" finds no reason to cast, the graph is Dynamo's own."""
    monkeypatch.delenv("FXAMP_POLICY", raising=False)
    model = Averaging(added)
    twin = copy.deepcopy(model)
    twin.compile(backend="fxamp", options={"lowering": "aot_eager"})
    assert_equal(gradients(twin), gradients(model))


@pytest.mark.parametrize("lowering", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_an_input_with_a_gradient_may_be_overwritten(lowering: str) -> None:
    """AOTAutograd writes to it after the forward, and a backward that reads it raised an error."""

    def program(x: Tensor, weight: Tensor) -> Tensor:
        before = x.exp()
        x.mul_(2)
        return before @ weight * x.cos()

    def gradient(call: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        leaves = [torch.linspace(-1, 1, 16).view(4, 4).requires_grad_() for _ in range(2)]
        x = leaves[0] * 1
        (call(x, leaves[1]).sum() + x.square().sum()).backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    torch._dynamo.reset()
    compiled = torch.compile(program, backend="fxamp", options={"policy": "cpu-bfloat16", "lowering": lowering})
    torch.testing.assert_close(gradient(compiled), gradient(program), rtol=3e-2, atol=3e-2)
