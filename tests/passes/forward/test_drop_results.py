"""drop-results: what is not made in training, what stays, and what the log says."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.checks.bench_graph import Workbench, policy, workbench
from torch import Tensor, nn
from torch.nn import functional as F

from fxamp.passes.forward.drop_results import DropResults
from fxamp.policy import Policy, Rule

CLASSES = 12
ROWS, TARGET = torch.arange(80.0).view(10, 8) / 40, torch.arange(10) % CLASSES


class Model(nn.Module):
    """A loss and its logits; ``returned`` makes of these two what the model returns."""

    def __init__(self, returned: Callable[[Tensor, Tensor], Any] = lambda loss, logits: (loss, logits)) -> None:
        super().__init__()
        self.head, self.returned = nn.Linear(8, CLASSES), returned

    def forward(self, x: Tensor, target: Tensor) -> Any:
        logits = self.head(x)
        return self.returned(F.cross_entropy(logits, target), logits)


def dropping(**conditions: Any) -> Policy:
    return policy(Rule("drop", drop=True, **(conditions or {"modules": ["head"]})))


def bench_of(module: nn.Module, under: Policy | None = None) -> Workbench:
    return workbench(module, ROWS, TARGET, under=under or dropping())


def dropped(bench: Workbench) -> int:
    return bench.run(DropResults()).modified


def test_logits_beside_a_loss() -> None:
    bench = bench_of(Model(lambda loss, logits: (loss, logits.float()[:, 1:].tanh().view(-1), logits.float())))
    assert bench.golden("drop-results", DropResults()).modified == 1
    assert dropped(bench) == 0


@pytest.mark.parametrize(
    ("under", "number"),
    [
        (dropping(ops=["linear"]), 1),
        (dropping(args={"result": {"shape": ["...", CLASSES], "dtype": "float32"}}), 1),
        (dropping(elements=">=120"), 1),
        (dropping(module_classes=["Linear"]), 1),
        (dropping(ops=["mm"]), 0),
        (dropping(elements=">120"), 0),
        (dropping(args={"result": {"rank": ">2"}}), 0),
        (policy(), 0),
    ],
)
def test_the_usual_conditions_decide(under: Policy, number: int) -> None:
    bench = bench_of(Model(), under)
    before = bench.text
    assert dropped(bench) == number
    assert (bench.text == before) == (not number)


RETURNED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "no loss": lambda loss, logits: logits,
    "a loss of each row": lambda loss, logits: (logits.logsumexp(-1), logits),
}


@pytest.mark.parametrize("returned", RETURNED)
def test_without_a_loss_all_results_are_made(returned: str) -> None:
    assert dropped(bench_of(Model(RETURNED[returned]))) == 0


def test_where_nothing_learns_all_results_are_made() -> None:
    assert dropped(bench_of(Model().requires_grad_(False))) == 0
    bench = bench_of(Model())
    with torch.no_grad():
        assert dropped(bench) == 0
    assert dropped(bench) == 1


def test_an_input_that_is_returned_stays() -> None:
    class Echo(Model):
        def forward(self, x: Tensor, target: Tensor) -> Any:
            return *super().forward(x, target), x.view(-1)

    assert dropped(bench_of(Echo(), dropping(args={"result": {"rank": ">=1"}}))) == 1


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"ended": "model.py:3: print"}, "a graph break ends its graph (model.py:3: print)"),
        ({"called_by": "model.py:3: forward"}, "model.py:3: forward calls its graph and may read it"),
    ],
)
def test_results_that_code_inside_the_call_may_read_are_made(
    facts: dict[str, str], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = bench_of(Model())
    bench.context = replace(bench.context, **facts)
    with caplog.at_level(logging.WARNING, "fxamp"):
        assert dropped(bench) == 0
    assert f"is not dropped: {why}" in caplog.text


def test_what_only_a_dropped_result_read_is_gone() -> None:
    """But no random numbers, on which others depend, and nothing that writes."""

    class Noisy(Model):
        def forward(self, x: Tensor, target: Tensor) -> Any:
            loss, logits = super().forward(x, target)
            return loss, F.dropout(logits).exp()

    bench = bench_of(Noisy(), dropping(ops=["exp"]))
    assert dropped(bench) == 1
    assert "exp" not in bench.text and "dropout" in bench.text
