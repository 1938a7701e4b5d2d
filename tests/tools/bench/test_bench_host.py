"""fxamp-bench host: what it prints, and a budget of calls for each of its rows."""

import json

import pytest
import torch
from support.checks.exhaustive import exhaustive

from fxamp.tools.bench import command as bench
from fxamp.tools.bench.host.steps import KINDS, Row, calls, start

#: Kind -> calls of a step over those of torch's, with 8 parameters (the optimizer: with 40), and calls that each
#: further parameter adds, beyond what it adds to torch's.
BUDGET = {
    "plain": (1.02, 0.0),
    "scaled": (1.09, 0.0),
    "scaled, skip on the device": (1.17, 0.0),
    "scaled convolutions": (1.09, 0.0),
    "compiled optimizer": (0.50, 0.0),
}
FEW, MORE = 8, 12


def counted(kind: str, parameters: int) -> dict[str, int]:
    torch._dynamo.reset()
    return calls(start(Row(kind, parameters)))


@pytest.mark.parametrize("kind", exhaustive(KINDS, always=["compiled optimizer"]))
def test_a_step_stays_within_its_budget_of_calls(kind: str) -> None:
    """Calls, not time: a count is the same on a busy machine."""
    most, most_for_each = BUDGET[kind]
    few = counted(kind, 5 * FEW if kind == "compiled optimizer" else FEW)
    more = counted(kind, 5 * MORE if kind == "compiled optimizer" else MORE)
    added = {who: (more[who] - few[who]) / (MORE - FEW) for who in few}
    assert few["fxamp"] <= most * few["torch"]
    assert added["fxamp"] <= added["torch"] + most_for_each


@pytest.mark.exhaustive
def test_a_row_is_measured_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--only", "compiled optimizer", "--parameters", "6", "--rounds", "2", "--steps", "1"]
    assert bench.main(["host", *options, "--lowering", "aot_eager", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (row,) = document["rows"]
    assert (row["step"], row["parameters"], len(row["us"])) == ("compiled optimizer", 6, 2)
    assert all(found[who] > 0 for found in row["us"] for who in ("torch", "fxamp"))
    assert row["calls"]["torch"] > 0 < row["calls"]["fxamp"]
