"""Compiled autograd that a program enables after the forward was compiled, as torch's tutorial does."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.machines.lacks import needs_compiler
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.compiled_autograd import AutogradCompilerInstance
from torch._inductor.utils import fresh_cache

import fxamp
from fxamp.errors import OptionError

BASE = 'extends = ["cpu-bfloat16"]\n'
WIDE = BASE + '[[rule]]\nid = "wide"\ncast = "fp32"\nops = ["mm"]\nregion = "backward"\n'
IN_8_BITS = BASE + '[[rule]]\nid = "packed"\nkeep = "int8"\nops = ["relu"]\n'

#: By what acts on each run of a backward: the options, and the begin of the error.
REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "scaler": (
        lambda: {"policy": "cpu-float16", "scaler": fxamp.GradScaler("cpu")},
        "option 'scaler' scales backward graphs",
    ),
    "nonfinite": (lambda: {"policy": "cpu-bfloat16", "nonfinite": "log"}, "option 'nonfinite' measures"),
    "rules": (lambda: {"policy": fxamp.Policy.loads(WIDE)}, "policy .* has rules for the backward"),
    "steps": (
        lambda: {"policy": fxamp.Policy.loads(BASE + "[optimizer]\nin_backward = true\n")},
        "policy .* has in_backward = true",
    ),
}

#: What the graph itself contains.
KEPT = {"casts": "cpu-bfloat16", "packed": fxamp.Policy.loads(IN_8_BITS)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu()).float().square().mean()


@contextmanager
def enabled() -> Iterator[None]:
    with compiled_autograd._enable(torch.compile(backend="eager")):
        yield


def around(loss: Tensor) -> None:
    with enabled():
        loss.backward(retain_graph=True)


def switched_on(loss: Tensor) -> None:
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: loss.backward(retain_graph=True), backend="eager")()


def by_fxamp(loss: Tensor) -> None:
    options = {"policy": "cpu-bfloat16", "lowering": "aot_eager"}
    with compiled_autograd._enable(torch.compile(backend="fxamp", options=options)):
        loss.backward(retain_graph=True)


def in_a_compiled_step(loss: Tensor) -> None:
    options = {"policy": "cpu-bfloat16", "lowering": "eager"}
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: loss.backward(retain_graph=True), backend="fxamp", options=options)()


def loss_and_net(options: dict[str, Any]) -> tuple[Tensor, Net]:
    torch.manual_seed(0)
    net = Net()
    compiled = torch.compile(net, backend="fxamp", options={"lowering": "aot_eager", **options})
    return compiled(torch.randn(3, 4)), net


@pytest.mark.parametrize("way", [around, switched_on])
@pytest.mark.parametrize("case", REFUSED)
def test_what_acts_on_runs_of_the_backward_refuses_it(case: str, way: Callable[[Tensor], None]) -> None:
    options, message = REFUSED[case]
    loss, net = loss_and_net(options())
    with pytest.raises(OptionError, match=rf"{message}.*compiled autograd, enabled after .*; accepted: backward\(\)"):
        way(loss)
    assert all(parameter.grad is None for parameter in net.parameters())
    loss.backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


@needs_compiler
def test_a_graph_from_the_cache_refuses_it_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with fresh_cache():
        for hits in (0, 1):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            for name in ("proxy_call_aot_backward", "end_capture"):  # as in a process without fxamp's graphs
                own = inspect.unwrap(getattr(AutogradCompilerInstance, name))
                monkeypatch.setattr(AutogradCompilerInstance, name, own)
            loss, _ = loss_and_net({"policy": fxamp.Policy.loads(WIDE), "lowering": "inductor"})
            assert torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"] == hits
            with pytest.raises(OptionError, match="has rules for the backward"):
                switched_on(loss)
            loss.backward()


@pytest.mark.parametrize("way", [around, switched_on, by_fxamp, in_a_compiled_step])
@pytest.mark.parametrize("case", KEPT)
def test_what_a_graph_contains_is_kept(case: str, way: Callable[[Tensor], None]) -> None:
    gradients = []
    for run in (way, Tensor.backward):
        loss, net = loss_and_net({"policy": KEPT[case]})
        run(loss)
        gradients.append([parameter.grad for parameter in net.parameters()])
    for ours, plain in zip(*gradients, strict=True):
        assert ours is not None and plain is not None and torch.equal(ours, plain)
