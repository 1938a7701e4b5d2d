"""Dynamo's capture of one whole graph is as fxamp takes it to be."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import functional_export

import fxamp
from fxamp import torch_private as private


def _doubled(x: Tensor) -> None:
    x.mul_(2)


def _ones() -> Tensor:
    return torch.ones(2)


def _capture(program: Callable[..., Any], *inputs: Tensor) -> Any:
    return functional_export.dynamo_graph_capture_for_export(program)(*inputs)(*inputs)


def test_a_graph_may_return_nothing() -> None:
    x, codegen = torch.ones(2, 3), functional_export._DynamoBytecodeCodeGen
    with private.returning_nothing():
        assert _capture(_doubled, x) is None
        assert torch.equal(_capture(_ones), torch.ones(2))
    assert torch.equal(x, torch.full((2, 3), 2.0))
    assert functional_export._DynamoBytecodeCodeGen is codegen


def test_torch_still_needs_it() -> None:
    with pytest.raises(SyntaxError):
        _capture(_doubled, torch.ones(2, 3))
    with pytest.raises(NameError):
        _capture(_ones)


class _Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(2))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x


def test_a_graph_may_have_no_inputs() -> None:
    """The rewritten graph reads the module's tensors itself, and its caller's arguments are what it returns."""
    module, x = _Counter(), torch.ones(2, 3)
    rewritten = fxamp.rewrite(module, [x], "cpu-bfloat16")
    assert torch.equal(rewritten(x), x)
    assert module.calls.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        (lambda module, x: setattr(module, "calls", x), ["module._buffers"]),
        (lambda module, x: setattr(module, "calls", ~module.calls.bool()), ["module._buffers"]),
        (lambda module, x: setattr(module, "seen", module.seen | (x > 0)), ["module._buffers"]),
        (lambda module, x: setattr(module, "seen", module.seen & (x > 0)), ["module._buffers"]),
        (lambda module, x: setattr(module, "seen", ~module.seen), ["module._buffers"]),
        (lambda module, x: setattr(module, "last", x), ["module"]),
        (lambda module, x: setattr(module, "training", 1), ["module"]),
        (lambda module, x: _FOUND.append(x), ["_FOUND"]),
    ],
)
def test_changes_that_a_graph_lacks_are_found(change: Callable[[Any, Tensor], object], changed: list[str]) -> None:
    def program(module: nn.Module, x: Tensor) -> Tensor:
        change(module, x + 1)
        return x + 2

    with private.raising_lost_changes(), pytest.raises(Exception) as raised:
        functional_export.dynamo_graph_capture_for_export(program)(_Counter(), torch.ones(2))
    assert private.lost_changes(raised.value) == changed
    assert private.lost_changes(ValueError("another")) == []


_FOUND: list[Tensor] = []


class _Assigning(_Counter):
    """Assigns what its buffer and its attribute hold, after writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.also = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.calls = self.calls.mul_(2)
        self.also -= 1
        return x


class _Toggling(_Assigning):
    """Sets a flag and resets it, as transformers' models do around their forward."""

    def __init__(self) -> None:
        super().__init__()
        self.active = False

    def forward(self, x: Tensor) -> Tensor:
        self.active = _FLAG.active = True
        result = super().forward(x)
        self.active = _FLAG.active = False
        return result


class _Flag:
    active = False


_FLAG = _Flag()
_FLAG.active = False


@pytest.mark.parametrize("kind", [_Counter, _Assigning, _Toggling])
def test_writes_in_place_are_in_the_graph(kind: type[nn.Module]) -> None:
    with private.raising_lost_changes(), private.returning_nothing():
        _capture(kind(), torch.ones(2, 3))


def test_a_module_that_assigns_what_it_has_is_rewritten() -> None:
    module = _Assigning()
    rewritten = fxamp.rewrite(module, [torch.ones(2, 3)], "cpu-bfloat16")
    rewritten(torch.ones(2, 3))
    assert module.calls.tolist() == [2, 2] and module.also.tolist() == [-1, -1]
