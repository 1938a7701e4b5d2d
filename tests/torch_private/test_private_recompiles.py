"""Dynamo's recompile limits are noticed before it gives a function up, and calls of what it returned are watched."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import utils

from fxamp import torch_private as private


def adds(x: Tensor) -> Tensor:
    return x + 1


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("setting", ["recompile_limit", "accumulated_recompile_limit"])
def test_a_limit_is_noticed_once_and_where_torch_raises_not_at_all(
    fullgraph: bool, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(utils, "_recompile_user_contexts", None)
    limits: list[private.RecompileLimit] = []
    private.on_recompile_limit(limits.append)
    graphs: list[Any] = []

    def backend(gm: torch.fx.GraphModule, _: list[Any]) -> Any:
        graphs.append(gm)
        assert private.compiling_frame() is not None
        return gm.forward

    torch._dynamo.reset()
    function = torch.compile(adds, backend=backend, dynamic=False, fullgraph=fullgraph)
    with torch._dynamo.config.patch({setting: 2}):
        for size in (1, 2):
            function(torch.ones(size))
        assert limits == []
        if fullgraph:
            with pytest.raises(Exception, match="fullgraph=True"):
                function(torch.ones(3))
            assert limits == []
            return
        for size in (3, 4):
            assert torch.equal(function(torch.ones(size)), torch.full((size,), 2.0))
    (limit,) = limits
    assert (limit.code, limit.setting, limit.most, len(graphs)) == (adds.__code__, setting, 2, 2)
    assert "expected 2, actual 3" in limit.reason
    assert private.compiling_frame() is None


class Net(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def of_a_function() -> tuple[Any, Any]:
    function = torch.compile(adds, backend="eager")
    return function, function


def of_a_module() -> tuple[Any, Any]:
    module = torch.compile(Net(), backend="eager")
    return module, module


def in_place() -> tuple[Any, Any]:
    module = Net()
    module.compile(backend="eager")
    return module, module._compiled_call_impl


@pytest.mark.parametrize("make", [of_a_function, of_a_module, in_place])
def test_each_call_is_watched_even_one_that_raises(make: Any) -> None:
    call, compiled = make()
    events: list[str] = []

    def enter() -> Any:
        events.append("enters")
        return lambda: events.append("leaves")

    private.on_each_call(compiled, enter)
    assert private.context_of(private.context_of(compiled)) is private.context_of(compiled)
    call(torch.ones(2))
    with pytest.raises(Exception):  # noqa: B017
        call("no tensor")
    assert events == ["enters", "leaves"] * 2
