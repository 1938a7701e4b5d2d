"""Once Dynamo reaches its recompile limit, calls without casts are counted, and the log says so once."""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp

LIMIT = 2
SIZES = (1, 2, 3, 2, 4, 5)
OPTIONS = {"policy": "cpu-bfloat16", "lowering": "eager"}
REMEDIES = ("dynamic=True", "mark_dynamic", "raise the limit", "keep torch.autocast around")


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width, self.body = width, nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Broken(Net):
    """The function that follows the graph break reads ``mode``; the first one does not."""

    mode = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        torch._dynamo.graph_break()
        return self.body(hidden) + self.mode


Call = Callable[[Tensor], Tensor]


def in_place(net: Net, options: dict[str, Any], **settings: Any) -> tuple[Call, Any]:
    net.compile(backend="fxamp", options=options, **settings)
    return net, net


def as_a_module(net: Net, options: dict[str, Any], **settings: Any) -> tuple[Call, Any]:
    compiled = torch.compile(net, backend="fxamp", options=options, **settings)
    return compiled, compiled


def as_a_function(net: Net, options: dict[str, Any], **settings: Any) -> tuple[Call, Any]:
    compiled = torch.compile(lambda x: net.body(x), backend="fxamp", options=options, **settings)
    return compiled, compiled


@pytest.fixture(autouse=True)
def low_limit() -> Iterator[None]:
    gc.collect()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=LIMIT):
        yield


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [record for record in caplog.records if record.name.startswith("fxamp")]
    return [record.getMessage() for record in records if record.levelno >= logging.WARNING]


def calls_in_float32(net: Net, call: Call, sizes: Sequence[int]) -> int:
    """Call with batches of ``sizes``; return how often the result was that of the model without casts."""
    torch.manual_seed(0)
    batches = [torch.randn(size, net.width) for size in sizes]
    return sum(torch.equal(call(x), net.forward(x)) for x in batches)


@pytest.mark.parametrize("make", [in_place, as_a_module, as_a_function])
def test_calls_without_casts_are_counted(make: Callable, caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    call, compiled = make(net, OPTIONS, dynamic=False)
    assert calls_in_float32(net, call, SIZES) == 3

    (line,) = fxamp.report(compiled).limited
    assert f"{__file__}:" in line and ": 3 calls without casts; torch._dynamo.config.recompile_limit is 2" in line
    (message,) = said(caplog)
    assert "recompile_limit (2)" in message and line.split(": 3 calls")[0] in message
    assert all("tensor 'x' size mismatch at index 0. expected 2, actual 3" in text for text in (message, line))
    assert all(remedy in message and remedy in str(fxamp.report(compiled)) for remedy in REMEDIES)


def test_of_a_broken_graph_each_function_has_its_own_count(caplog: pytest.LogCaptureFixture) -> None:
    net = Broken()
    call, _ = in_place(net, OPTIONS, dynamic=False)
    for net.mode in (1, 2, 3, 1, 4):
        x = torch.randn(1, net.width)
        hidden = nn.functional.linear(x.bfloat16(), net.body.weight.bfloat16(), net.body.bias.bfloat16()).float()
        assert torch.equal(call(x), net.body(hidden) + net.mode) == (net.mode > 2)

    (line,) = fxamp.report(net).limited
    assert "torch_dynamo_resume_in_forward" in line and ": 2 calls without casts" in line
    assert len(said(caplog)) == 1
    assert calls_in_float32(net, call, (2, 3)) == 1  # its first function reaches the limit too
    lines = [line.removeprefix(f"{__file__}:") for line in fxamp.report(net).limited]
    assert len(lines) == 2 and "forward: 1 call without casts" in lines[1]


@pytest.mark.parametrize("settings", [{"dynamic": True}, {"larger": True}, {"marked": True}, {"autocast": True}])
def test_the_remedies_help(settings: dict[str, bool], caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    marked, larger, autocast = (settings.pop(name, False) for name in ("marked", "larger", "autocast"))
    call, compiled = in_place(net, OPTIONS, **settings)
    with torch._dynamo.config.patch(recompile_limit=99) if larger else nullcontext():
        for size in (2, 3, 4, 5, 6):
            x = torch.randn(size, net.width)
            if marked:
                torch._dynamo.mark_dynamic(x, 0)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                expected = net.forward(x)
                result = call(x) if autocast else None
            result = call(x) if result is None else result
            assert torch.equal(result.float(), expected.float())
    assert said(caplog) == [] and fxamp.report(compiled).limited == ()


@pytest.mark.parametrize("policy", ["auto", "cpu-bfloat16"])
def test_under_autocast_nothing_is_lost_and_nothing_logged(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    call, _ = in_place(net, OPTIONS | {"policy": policy}, dynamic=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert calls_in_float32(net, lambda x: call(x).float(), SIZES) == len(SIZES)  # the model alone is cast as well
    assert said(caplog) == [] and fxamp.report(net).limited == ()

    assert calls_in_float32(net, call, (7,)) == 1
    if policy == "auto":  # what has run under autocast runs without casts elsewhere, as in an evaluation
        assert said(caplog) == [] and fxamp.report(net).limited == ()
    else:
        assert len(said(caplog)) == 1 and "1 call without casts" in fxamp.report(net).limited[0]


def test_a_function_without_casts_loses_none(caplog: pytest.LogCaptureFixture) -> None:
    class Doubling(Net):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    net = Doubling()
    call, _ = in_place(net, OPTIONS, dynamic=False)
    assert calls_in_float32(net, call, SIZES) == len(SIZES)
    assert said(caplog) == [] and fxamp.report(net).limited == ()


@pytest.mark.parametrize("together", [False, True])
def test_models_of_one_class_that_get_no_graph_are_counted(together: bool, caplog: pytest.LogCaptureFixture) -> None:
    """``together``: one optimizer trains them all, so that graphs read some of its parameters."""
    nets = [Net(width) for width in (4, 5, 6, 7)]
    for net in nets:
        net.compile(backend="fxamp", options=OPTIONS, dynamic=False)
    groups = [nets] if together else [[net] for net in nets]
    for group in groups:
        optimizer = torch.optim.SGD([weight for net in group for weight in net.parameters()], lr=0.1)
        for _ in range(3):
            for net in group:
                net(torch.randn(2, net.width)).sum().backward()
            optimizer.step()

    (message,) = said(caplog)
    assert "recompile_limit (2)" in message and "never called" not in message
    assert [len(fxamp.report(net).graphs) for net in nets] == [1, 1, 0, 0]
    assert [len(fxamp.report(net).limited) for net in nets] == [0, 0, 1, 1]
    assert "3 calls without casts" in fxamp.report(nets[2]).limited[0]
    # The last model is watched from the first step of an optimizer on.
    assert f"{2 if together else 3} calls without casts" in str(fxamp.report(nets[3]))


def test_a_model_that_shares_graphs_is_counted_though_another_reached_the_limit() -> None:
    nets = [Net() for _ in range(3)]
    for net in nets:
        net.compile(backend="fxamp", options=OPTIONS, dynamic=False)
    assert calls_in_float32(nets[1], nets[1], (1, 2)) == 0
    assert calls_in_float32(nets[0], nets[0], (1, 2, 3)) == 1
    assert calls_in_float32(nets[1], nets[1], (3, 1, 4)) == 2
    assert calls_in_float32(nets[2], nets[2], (1, 5, 6)) == 2
    counts = [fxamp.report(net).limited[0].split("forward: ")[1].split(";")[0] for net in nets]
    assert counts == ["1 call without casts", "2 calls without casts", "2 calls without casts"]


@pytest.mark.parametrize("backend", ["eager", "fxamp"])
def test_other_backends_and_functions_after_a_reset_are_left_alone(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net()
    net.compile(backend=backend, options=OPTIONS if backend == "fxamp" else None, dynamic=False)
    calls_in_float32(net, net, SIZES)
    caplog.clear()
    torch._dynamo.reset()
    net.compile(backend="fxamp", options=OPTIONS, dynamic=False)
    assert calls_in_float32(net, net, (1, 2)) == 0
    assert said(caplog) == [] and fxamp.report(net).limited == ()


def test_an_error_of_torchs_is_enough(caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    net.compile(backend="fxamp", options=OPTIONS, dynamic=False, fullgraph=True)
    with pytest.raises(Exception, match="fullgraph=True"):
        calls_in_float32(net, net, SIZES)
    assert said(caplog) == [] and fxamp.report(net).limited == ()
