"""Compiled autograd shows fxamp each of AOTAutograd's graphs whose backward it traces, and raises what fxamp says."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.compiled_autograd import AutogradCompilerInstance, _enable

from fxamp import torch_private as private


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take back for a test what fxamp has replaced in this process."""
    for name in ("proxy_call_aot_backward", "end_capture"):
        method = inspect.unwrap(getattr(AutogradCompilerInstance, name))
        monkeypatch.setattr(AutogradCompilerInstance, name, method)


def test_dynamo_does_not_compile_the_refusal() -> None:
    """torch.compile may run the backward; compiling the tracer's frames fails for some symbolic sizes."""
    compiles: list[bool] = []

    def refusal(_: Any) -> None:
        compiles.append(callable(get_eval_frame_callback()))

    private.refuse_compiled_autograd_of(refusal)
    x = torch.ones(2, requires_grad=True)
    loss = torch.compile(lambda x: x.sin().sum(), backend="aot_eager")(x)
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: loss.backward(), backend="eager")()
    assert compiles == [False]


def test_a_refused_graph_raises_before_anything_has_run_and_stays_usable() -> None:
    refused: list[Any] = []

    def refuse() -> None:
        raise ZeroDivisionError

    def refusal(function: Any) -> Callable[[], None] | None:
        refused.append(function)
        return refuse if len(refused) == 1 else None

    private.refuse_compiled_autograd_of(refusal)
    private.refuse_compiled_autograd_of(refusal)
    x = torch.ones(2, requires_grad=True)
    losses = [torch.compile(lambda x, f=f: f(x).sum(), backend="aot_eager")(x) for f in (torch.sin, torch.exp)]
    with _enable(torch.compile(backend="eager")):
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                losses[0].backward(retain_graph=True)
        assert x.grad is None
        losses[1].backward()
    losses[0].backward()
    assert refused == [private.function_of(loss.grad_fn) for loss in losses]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (x.cos() + x.exp()).detach())


def test_its_graph_is_distinguished_from_what_a_hook_in_it_compiles() -> None:
    calls: list[tuple[bool, bool]] = []

    def backend(gm: torch.fx.GraphModule, _: list[Any]) -> Any:
        inner = any(node.target is torch.exp for node in gm.graph.nodes)
        calls.append((inner, private.compiles_backward()))
        return gm.forward

    @torch.compiler.disable
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        return torch.compile(torch.exp, backend=backend)(gradient)

    x = torch.ones(2, requires_grad=True)
    x.register_hook(hook)
    loss = torch.compile(lambda x: x.sin().sum(), backend=backend)(x)
    with _enable(torch.compile(backend=backend)):
        loss.backward()
    assert calls[0] == (False, False) and {(False, True), (True, False)} == set(calls[1:])
