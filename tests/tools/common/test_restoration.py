"""Entry points that look at a program change no tensor of it: parameters, buffers, plain tensors, inputs, gradients."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal

import fxamp
from fxamp.policy import Policy
from fxamp.tools.common.restoration import restored
from fxamp.tools.inputs.load import Request, load
from fxamp.tools.inputs.measurement import Copy
from fxamp.tools.policy.batches import Workload, load_work
from fxamp.tools.policy.bisect.trials import Trials
from fxamp.tools.policy.bisect.units import FLOAT32
from fxamp.tools.policy.calibrate.evidence import gather

FILE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))
        self.last = torch.zeros(4)

    def forward(self, x):
        self.calls.add_(1)
        x.add_(1)
        y = self.norm(self.layer(x))
        self.last.copy_(y.detach().sum(0))
        return y.sin()

torch.manual_seed(0)
net = Net()
net.layer.weight.grad = torch.ones(4, 4)
model = {model}
inputs = (torch.randn(8, 4),)
batches = [inputs] * 2
losses = torch.zeros(())

def loss(output):
    losses.add_(1)
    return output.sum()
"""
MODELS = {"module": "net", "symbolic trace": "torch.fx.symbolic_trace(net)", "function": "lambda x: net(x) * 2"}


@pytest.fixture(params=MODELS)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(FILE.replace("{model}", MODELS[request.param]))
    return str(path)


def tensors(defined: dict[str, Any]) -> list[torch.Tensor]:
    net = defined["net"]
    return [*net.parameters(), *net.buffers(), net.last, net.layer.weight.grad, *defined["inputs"], defined["losses"]]


def calibrate(work: Workload) -> None:
    gather(work, Policy.load("cpu-bfloat16").resolve("cpu"), True)


def bisect(work: Workload) -> None:
    policy = Policy.load("cpu-bfloat16").resolve("cpu")
    trials = Trials(work, tuple(work.batches()), policy, 0.5, "both", FLOAT32, lambda text: None)
    assert trials.places()
    trials.passes(())


def rewrite(work: Workload) -> None:
    (batch,) = list(work.batches())[:1]
    fxamp.rewrite(work.model, batch.args, policy="cpu-bfloat16")


def last_file() -> dict[str, Any]:
    """What the file that ran last defines."""
    return vars(sys.modules[[name for name in sys.modules if name.startswith("__fxamp_model_")][-1]])


@pytest.mark.parametrize("entry", [calibrate, bisect, rewrite])
def test_no_tensor_is_changed(entry: Callable[[Workload], None], file: str) -> None:
    work = load_work(file, lambda text: None)
    if entry is bisect and not isinstance(work.model, torch.nn.Module):
        pytest.skip("the copies that are float64 are made of modules")
    defined = last_file()
    before = tensors(defined)
    values = [tensor.clone() for tensor in before]
    entry(work)
    after = tensors(defined)
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert_equal(values, after)


def test_showing_changes_no_tensor(file: str) -> None:
    load(file, Request(policy="cpu-bfloat16"))
    defined = last_file()
    fresh: dict[str, Any] = {}
    exec(compile(Path(file).read_text(), file, "exec"), fresh)
    assert_equal(tensors(defined), tensors(fresh))


def test_showing_what_needs_values_changes_no_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.py"
    path.write_text(FILE.replace("{model}", "lambda x: net(x) * (2 if float(net(x).sum()) > 0 else 3)"))
    load(str(path), Request(policy="cpu-bfloat16"))
    assert "running the model on its real inputs" in capsys.readouterr().err
    fresh: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), fresh)
    shown = last_file()
    assert_equal(tensors(shown), tensors(fresh))


def test_every_run_of_a_copy_begins_with_the_same_tensors(file: str) -> None:
    work = load_work(file, lambda text: None)
    copy = Copy.of(work.model, tuple(work.batches()))
    first, second = (copy.run(copy.model, work.start) for _ in range(2))
    assert_equal(first.outputs, second.outputs)
    assert_equal(first.gradients, second.gradients)


def test_compiling_changes_what_running_changes(file: str) -> None:
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    for defined in (ours, theirs):
        exec(compile(Path(file).read_text(), file, "exec"), defined)
    options = {"lowering": "eager", "policy": "cpu-bfloat16"}
    call = torch.compile(lambda x: ours["model"](x), backend="fxamp", options=options)
    with torch.autocast("cpu", torch.bfloat16):
        expected = theirs["model"](*theirs["inputs"])
    assert torch.equal(call(*ours["inputs"]).float(), expected.float())
    assert_equal(tensors(ours), tensors(theirs))


def test_names_are_bound_again() -> None:
    module = torch.nn.Linear(2, 2)
    module.seen = before = torch.zeros(2)
    with restored(module):
        module.seen = torch.ones(2)
    assert module.seen is before
