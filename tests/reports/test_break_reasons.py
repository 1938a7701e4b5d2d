"""A report gives Dynamo's own reasons: for each graph break, and for each function that it skips."""

import importlib.util
import re

import pytest
import torch
from breaking_loops import REASON, Loops
from torch import Tensor, nn

import fxamp
from fxamp.reports import break_reasons
from fxamp.reports.report import Report

OPTIONS = {"policy": "cpu-bfloat16", "lowering": "eager"}
PRINTS = "Dynamo does not know how to trace builtin operator `print`"


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)


class Resumes(Two):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        print(end="")
        return self.second(hidden)


class Hooked(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class InTry(Two):
    """Dynamo cannot go on within the block, and compiles what comes before it only."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden = hidden + 1
        try:
            hidden = self.second(hidden)
            print(end="")
        finally:
            hidden = hidden * 2
        return hidden


class Branches(Two):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if hidden.sum() > 0:
            hidden = hidden + 1
        return self.second(hidden)


class LoopsInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(4, 4), Loops(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.head(x))


def reported(model: nn.Module) -> Report:
    model.compile(backend="fxamp", options=OPTIONS)
    model(torch.ones(2, 4))
    return fxamp.report(model)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Resumes, PRINTS), (InTry, PRINTS), (Branches, "Detected data-dependent branching")],
)
def test_a_break_has_the_reason_that_dynamo_knows(kind: type[nn.Module], reason: str) -> None:
    for _ in range(2):  # the message was counted before
        torch._dynamo.reset()
        report = reported(kind())
        (ended,) = report.breaks
        assert "test_break_reasons.py:" in ended and reason in ended and " or " not in ended
        assert report.skipped == ()


def test_a_break_that_dynamo_does_not_explain_has_its_title() -> None:
    model = Hooked()
    model.second.register_full_backward_hook(lambda module, entering, leaving: None)
    (ended,) = reported(model).breaks
    assert re.search(r":\d+: Module-level backwards hooks", ended)


def test_the_reason_is_not_that_of_another_function() -> None:
    reported(Loops(4))
    reported(Branches())
    (ended,) = reported(InTry()).breaks
    assert PRINTS in ended and "branching" not in ended


@pytest.mark.parametrize("inside", [False, True])
def test_a_function_that_is_skipped_is_named_with_the_reason(inside: bool) -> None:
    report = reported(LoopsInside() if inside else Loops(4))
    line = Loops.forward.__code__.co_firstlineno
    (skipped,) = report.skipped
    assert f"breaking_loops.py:{line}: forward: {REASON}" in skipped
    assert skipped in str(report) and REASON in report._repr_html_()
    assert bool(report.graphs) == inside


def test_functions_of_other_models_are_not_named() -> None:
    reported(Loops(4))
    assert reported(Resumes()).skipped == ()


def _written(x: torch.Tensor) -> torch.Tensor:
    tile = torch.empty(4, 8)[:, :3]
    with torch.no_grad():
        torch.mm(x.detach(), x.detach()[:, :3], out=tile)
    return x @ x + tile.sum()


def test_a_reason_has_its_heading_where_there_is_no_explanation() -> None:
    compiled = torch.compile(_written, backend="fxamp", options=OPTIONS)
    compiled(torch.ones(4, 4))
    (ended,) = fxamp.report(compiled).breaks
    assert "non-contiguous `out=` tensor: Dynamo does not support this" in ended


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            "Branching\n  Explanation: On a value.\n  Hint: Use cond.\n\n  Developer debug context: x",
            "Branching: On a value.",
        ),
        ("Branching:\n  Explanation: On\n    a value.\n  Hint: Use\n    cond.", "Branching: On a value."),
        ("Graph Break Reason: Branching.\n  Explanation: On a value.", "Branching: On a value."),
        ("In user code at a.py:1\nGraph Break Reason: A\n  Explanation: B\n\nC\n  Explanation: D", "A: B"),
        ("torch.* op returned non-Tensor\nfrom user code: a.py", "torch.* op returned non-Tensor"),
    ],
)
def test_a_message_becomes_its_heading_and_explanation(message: str, reason: str) -> None:
    assert break_reasons._first(message) == reason


def test_fxamp_may_be_imported_in_the_middle_of_a_compilation(monkeypatch):
    monkeypatch.setattr("fxamp.torch_private.on_each_compilation", lambda *_: None)
    spec = importlib.util.spec_from_file_location("imported_late", break_reasons.__file__)
    ended = []

    def backend(gm, _):
        late = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(late)
        ended.append(late.why_ended(gm))
        late._end()
        return gm.forward

    torch.compile(Resumes(), backend=backend)(torch.ones(2, 4))

    assert PRINTS in ended[0]
