"""Option "nonfinite" where a graph writes to its inputs and buffers: what it leaves in them is judged like a result."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from support.checks.exhaustive import each_once, exhaustive
from support.oracles.like_autocast import compile_with
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxamp

INF = torch.inf


class Recorder(nn.Module):
    """A layer that keeps a record of its results; ``write`` writes to it, or to the input."""

    def __init__(self, write: Callable[["Recorder", Tensor, Tensor], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm, self.write = nn.Linear(4, 4), nn.BatchNorm1d(4), write
        self.register_buffer("record", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x.clone())
        self.write(self, x, h.detach())
        return (h * 2).sum()


def _healed_in_parts(m: Recorder, x: Tensor, h: Tensor) -> None:
    m.record[:2].div_(0)
    m.record[0] = 1
    m.record[1] = 1


def _without_gradients(m: Recorder, x: Tensor, h: Tensor) -> None:
    with torch.no_grad():
        m.record.lerp_(h.float().mean(0) / 0, 0.1)


#: What is written, and the op that is named; None where the record stays finite, or is meant not to be.
WRITTEN: dict[str, tuple[Callable[[Recorder, Tensor, Tensor], object], str | None]] = {
    "a quotient in place": (lambda m, x, h: m.record.div_(0), "div_"),
    "a part": (lambda m, x, h: m.record[1:].div_(0), "div_"),
    "a part before another part": (lambda m, x, h: (m.record[1:].div_(0), m.record[:1].mul_(2)), "div_"),
    "an item": (lambda m, x, h: m.record.__setitem__(0, h.float().sum() / 0), "div"),
    "a copy": (lambda m, x, h: m.record.copy_((h.float().abs().sum(0) * 0).log()), "log"),
    "an average": (lambda m, x, h: m.record.mul_(0.9).add_(h.float().mean(0) / 0), "div"),
    "an average without gradients": (_without_gradients, "div"),
    "an input": (lambda m, x, h: x.div_(0), "div_"),
    "statistics": (lambda m, x, h: m.norm(h.float() * 1e30), "batch_norm"),
    "statistics in a checkpoint": (
        lambda m, x, h: checkpoint(lambda y: m.norm(y.float() * 1e30), h, use_reentrant=False),
        "tag_activation_checkpoint",
    ),
    "healed": (lambda m, x, h: m.record.div_(0).nan_to_num_(0, 0, 0), None),
    "healed in parts": (_healed_in_parts, None),
    "filled with infinities": (lambda m, x, h: m.record.fill_(-INF), None),
    "the largest so far": (lambda m, x, h: m.record.copy_(torch.maximum(torch.full((4,), INF), m.record)), None),
    "read alone": (lambda m, x, h: m.record + h, None),
}


@each_once("case, lowering", exhaustive(WRITTEN, always=list(WRITTEN)[::2]), ["eager", "aot_eager"])
def test_what_a_graph_leaves_in_its_inputs_is_judged(case: str, lowering: str) -> None:
    write, op = WRITTEN[case]
    plain = Recorder(write)
    model = compile_with(deepcopy(plain), lowering, policy="cpu-bfloat16", nonfinite="log")
    assert isinstance(model, Recorder)
    left: dict[nn.Module, list[Tensor]] = {}
    for module in (plain, model):
        x = torch.arange(12.0).view(3, 4)
        module(x).backward()
        left[module] = [x, *module.buffers()]
    finite = [bool(value.isfinite().all()) for value in left[plain]]
    assert [bool(value.isfinite().all()) for value in left[model]] == finite
    named = [found.op.partition("::")[2].partition(".")[0] for found in fxamp.report(model).nonfinite]
    assert named == ([op] if op else []) and (all(finite) or op or "infinit" in case or "largest" in case)


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_a_record_that_was_not_finite_is_not_named_again_unless_it_reaches_a_result(lowering: str) -> None:
    model = compile_with(Recorder(lambda m, x, h: m.record.add_(x[0] / x[0])), lowering, nonfinite="log", policy="auto")
    for number in (0.0, 1.0, 1.0):
        model(torch.full((3, 4), number))
    (found,) = fxamp.report(model).nonfinite
    assert (found.op, found.step, found.times) == ("aten::div.Tensor", 1, 1)


def test_a_graph_that_only_writes_is_judged() -> None:
    record = torch.ones(4)

    def write(x: Tensor) -> None:
        record.copy_(x.log())

    compiled = compile_with(write, "eager", policy="auto", nonfinite="log")
    compiled(torch.ones(4))
    assert not fxamp.report(compiled).nonfinite
    compiled(torch.zeros(4))
    assert [found.op for found in fxamp.report(compiled).nonfinite] == ["aten::log.default"]
