"""Ctrl-C in every long command: status 130, what was found until then on stdout, and no file half written."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from fxamp.tools.bench import command as bench
from fxamp.tools.bench.cost.count import Count
from fxamp.tools.bench.cost.policies import Figures
from fxamp.tools.diff import command as diff
from fxamp.tools.policy import command as policy

MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x) * 300.0))

torch.manual_seed(0)
model = Net()
inputs = (torch.randn(16, 8),)
batches = [(torch.randn(16, 8),) for _ in range(3)]

def loss(output):
    return output.square().mean()
"""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    yield
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"model.py"}, "it left a file"


def stopping(monkeypatch: pytest.MonkeyPatch, target: str, call: int) -> None:
    """Let Ctrl-C come in the ``call``-th call of the function or method ``target``, by its whole name."""
    function, calls = resolve_name(target), itertools.count(1)

    def stopped(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    monkeypatch.setattr(target, stopped)


def interrupted(main: Callable[[list[str]], int], line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command prints before Ctrl-C."""
    assert main(line.split()) == 130
    out, err = capsys.readouterr()
    assert err.rstrip().endswith("interrupted") and "Traceback" not in err
    return out


@pytest.mark.parametrize(("main", "line"), [(policy.main, "calibrate model.py"), (bench.main, "cost --model mlp")])
def test_a_subcommand_may_be_stopped_while_it_loads(
    main: Callable[[list[str]], int], line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping(monkeypatch, "fxamp.tools.common.subcommands.import_module", 1)
    assert interrupted(main, line, capsys) == ""


def test_kernels_prints_those_that_are_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="machine code needs triton's compiler")
    from fxamp.tools.bench.cost.kernels import subjects

    update = subjects.Subject("scale update", True, 0.0, lambda wave: subjects._update())
    monkeypatch.setattr(subjects, "subjects", lambda: [update, replace(update, name="another")])
    stopping(monkeypatch, "fxamp.tools.bench.cost.kernels.rows.rows", 2)
    out = interrupted(bench.main, "kernels --arch sm_80", capsys)
    assert "scale update" in out and "another" not in out


def test_cost_prints_the_ways_that_are_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def counts(requests: Any) -> Iterator[Count]:
        next(iter(requests))
        yield Count(graphs=1)
        raise KeyboardInterrupt

    monkeypatch.setattr("fxamp.tools.bench.cost.command.counts", counts)
    out = interrupted(bench.main, "cost --model mlp", capsys)
    assert "torch.compile + autocast" in out and "fxamp under autocast" not in out


def test_policies_prints_the_figures_that_are_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def figures(names: Any) -> Iterator[tuple[str, Figures]]:
        yield names[0], Figures(error=1.25)
        raise KeyboardInterrupt

    monkeypatch.setattr("fxamp.tools.bench.cost.policies.figures", figures)
    line = "policies --policy cpu-bfloat16-fast --policy cpu-bfloat16-lean --output figures.json"
    out = interrupted(bench.main, line, capsys)
    assert "1.250" in out and "lean" not in out


@pytest.mark.exhaustive
def test_train_prints_the_whole_rounds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stopping(monkeypatch, "fxamp.tools.bench.train.turns.Runner.attempt", 1 + 3)  # the first call starts the process
    out = interrupted(
        bench.main, "train --model mlp --size tiny --contenders eager-float32 --steps 1 --rounds 5", capsys
    )
    assert "2 rounds" in out


def test_diff_prints_the_errors_of_the_policy_that_ran(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping(monkeypatch, "fxamp.tools.diff.numbers.under_policy", 2)
    out = interrupted(diff.main, "cpu-bfloat16 cpu-bfloat16-fast --run model.py --output diff.txt", capsys)
    assert out.startswith("cpu-bfloat16: {'output': ")


def test_bisect_prints_the_smallest_set_so_far(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fxamp.tools.policy.bisect.trials import Trials

    passes, calls = Trials.passes, itertools.count(1)

    def stopped(self: Trials, units: Any) -> bool:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return passes(self, units)

    monkeypatch.setattr(Trials, "passes", stopped)
    line = "bisect model.py --tolerance 1e-4 --policy cpu-bfloat16 --output patch.toml"
    out = interrupted(policy.main, line, capsys)
    assert out.startswith("2 trials; the smallest set so far in float32: ")


def test_calibrate_proposes_what_the_batches_until_then_say(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping(monkeypatch, "fxamp.tools.policy.calibrate.evidence._run", 2)
    out = interrupted(policy.main, "calibrate model.py --policy cpu-float16 --output patch.toml", capsys)
    assert "from 1 batch" in out and 'extends = ["cpu-float16"]' in out
