"""fxamp-bench optimizers on a few optimizers: its words are true, table and JSON agree, wrong options are refused."""

import json
import logging
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from fxamp.graph import GraphWriter
from fxamp.passes.base import Context, Result
from fxamp.passes.step.guard_updates import FLAG, GuardUpdates
from fxamp.tools.bench import command as bench
from fxamp.tools.bench.optimizers.agreement import DIFFERS, EQUAL, ROUNDING, agreement
from fxamp.tools.bench.optimizers.exact import Float64, train_exactly
from fxamp.tools.bench.optimizers.host_syncs import host_syncs
from fxamp.tools.bench.optimizers.measure import Setup, measure
from fxamp.tools.bench.optimizers.optimizers import Choice, choices, make
from fxamp.tools.bench.optimizers.result import FAILS, NOT_IN_TORCH
from fxamp.tools.bench.optimizers.scenario import SCENARIOS
from fxamp.tools.bench.optimizers.table import ARROW, bytes_text
from fxamp.tools.bench.optimizers.training import Training, by_torch
from fxamp.tools.bench.optimizers.users_own import Counting

EAGER = Setup("cpu", "aot_eager")
NAMES = ("AdamW", "LBFGS", "SparseAdam")
ARGUMENTS = ["optimizers", "--lowering", "aot_eager", "--optimizers", ",".join(NAMES)]


class Unguarded(GuardUpdates):
    """Takes the flag and does not look at it."""

    def run(self, gm: GraphModule, context: Context) -> Result:
        GraphWriter(gm.graph, context.mode).input(FLAG, dtype=torch.float32, device=torch.device("cpu"))
        gm.recompile()
        return Result(1)

    def ensures(self, gm: GraphModule, context: Context) -> str | None:
        return None


@pytest.fixture(scope="module")
def printed() -> tuple[dict[str, Any], str]:
    """The JSON, and the Markdown of another run."""
    texts = []
    for style in ("--json", "--markdown"):
        with redirect_stdout(StringIO()) as out:
            assert bench.main([*ARGUMENTS, style]) == 0
        texts.append(out.getvalue().rstrip("\n"))
    document, table = texts
    return json.loads(document), table


def rows_by_name(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in document["rows"]}


def test_rows_tell_who_decides_and_that_nothing_waits(printed: tuple[dict[str, Any], str]) -> None:
    rows = rows_by_name(printed[0])
    assert tuple(rows) == NAMES
    assert {name: row["decided_by"] for name, row in rows.items()} == {
        "AdamW": "device",
        "LBFGS": "host",
        "SparseAdam": "host",
    }
    assert rows["AdamW"]["step"]["fxamp"]["host_syncs"] == 0 and not rows["AdamW"]["reasons"]
    assert rows["AdamW"]["step"]["torch"]["host_syncs"] == 1
    assert "closure" in rows["LBFGS"]["reasons"][0] and "sparse" in rows["SparseAdam"]["reasons"][0]


def test_what_the_host_decides_is_the_eager_step_itself(printed: tuple[dict[str, Any], str]) -> None:
    """Clipping apart, whose norm is summed in another order; torch before 2.15 cannot clip sparse gradients."""
    rows = rows_by_name(printed[0])
    for name in ("LBFGS", "SparseAdam"):
        words = {scenario: cell["word"] for scenario, cell in rows[name]["scenarios"].items()}
        last = words.pop("clipping")
        assert set(words.values()) == {EQUAL}
        assert last in (EQUAL, ROUNDING) or (last == NOT_IN_TORCH and name == "SparseAdam")
        assert rows[name]["step"]["torch"]["host_syncs"] == rows[name]["step"]["fxamp"]["host_syncs"]


def test_table_and_json_have_the_same_numbers(printed: tuple[dict[str, Any], str]) -> None:
    document, table = printed
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    drawn = {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}
    for row in document["rows"]:
        decided, *words, syncs, plain, clipped = drawn[row["label"]]
        assert decided == row["decided_by"]
        assert words == [cell["word"].replace(NOT_IN_TORCH, "-") for cell in row["scenarios"].values()]
        assert syncs == ARROW.join(str(row["step"][side]["host_syncs"]) for side in ("torch", "fxamp"))
        for text, step in ((plain, row["step"]), (clipped, row["clipped"])):
            counts = [step[side] and bytes_text(step[side]["bytes"]) for side in ("torch", "fxamp")]
            assert text == ("-" if set(counts) <= {"-", None} else ARROW.join(counts))


def test_torch_s_own_bytes_are_the_known_ones(printed: tuple[dict[str, Any], str]) -> None:
    """Check and unscaling read and write 4 bytes each; AdamW 28, fused; clipping's norm and product 8 more, less 4."""
    reference = printed[0]["reference"]
    assert bytes_text(reference["step"]["bytes"]) == "40"
    assert bytes_text(reference["clipped"]["bytes"]) == "48"


def test_a_guard_that_does_not_guard_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxamp.passes.sequences.GuardUpdates", Unguarded)
    row = measure("SGD", choices()["SGD"], EAGER)
    words = {name: cell.word for name, cell in row.scenarios.items()}
    assert words["clean"] != DIFFERS and row.wrong
    assert words["skipped later"] == words["accumulation"] == words["clipping"] == DIFFERS
    assert row.scenarios["skipped later"].why == "parameter 0 is not finite, torch's is"


def test_status_1_tells_that_one_differs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("fxamp.passes.sequences.GuardUpdates", Unguarded)
    assert bench.main([*ARGUMENTS[:3], "--optimizers", "SGD"]) == 1
    assert "SGD, skipped later, differs: parameter 0 is not finite" in capsys.readouterr().out


class Stubborn(Counting):
    """Does not step under fxamp."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if any(parameter.dtype == torch.float64 for group in self.param_groups for parameter in group["params"]):
            return
        raise ArithmeticError("no\nreally")


def test_an_optimizer_that_torch_cannot_run_is_no_failure_of_fxamps() -> None:
    row = measure("Stubborn", Choice(Stubborn), EAGER)
    assert {cell.word for cell in row.scenarios.values()} == {NOT_IN_TORCH} and not row.wrong
    assert row.scenarios["clean"].why == "ArithmeticError: no"
    assert row.decided_by == "-" and row.step.torch is None


def test_an_error_of_fxamps_alone_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("here")

    monkeypatch.setattr("fxamp.GradScaler.update", refuse)
    row = measure("SGD", choices()["SGD"], EAGER)
    assert {(cell.word, cell.why) for cell in row.scenarios.values()} == {(FAILS, "ValueError: here")} and row.wrong
    assert row.step.torch is not None and row.step.fxamp is None


def test_one_rounding_is_rounding_and_two_hundred_are_not() -> None:
    ours, theirs, exact = (
        Training(make("SGD", {"lr": 0.1}), by_torch(), dtype).run(SCENARIOS["clean"])
        for dtype in (torch.float32, torch.float32, torch.float64)
    )
    assert agreement(ours, theirs, exact).word == EQUAL
    with torch.no_grad():
        ours.parameters[1].mul_(1 + torch.finfo(torch.float32).eps)
    assert agreement(ours, theirs, exact).word == ROUNDING
    with torch.no_grad():
        ours.parameters[1].mul_(1 + 200 * torch.finfo(torch.float32).eps)
    found = agreement(ours, theirs, exact)
    assert found.word == DIFFERS and found.where is not None and found.where.startswith("parameter 1 is ")


def test_float64_is_not_narrowed() -> None:
    """Muon computes in bfloat16, whose rounding, 2 ** -9 of a step, no float64 training with it could see."""
    plain, exact = (Training(make("Muon", {}), by_torch(), torch.float64) for _ in range(2))
    plain.run(SCENARIOS["clean"])
    train_exactly(exact, SCENARIOS["clean"])
    off = max((p - q).abs().max().item() for p, q in zip(plain.parameters, exact.parameters, strict=True))
    step = plain.optimizer.defaults["lr"]
    assert torch.finfo(torch.float32).eps * step < off < 5 * step
    with Float64():
        assert torch.ones(2).bfloat16().dtype == torch.bfloat16


def test_another_scale_differs() -> None:
    ours, theirs = (Training(make("SGD", {"lr": 0.1}), by_torch()).run(SCENARIOS["clean"]) for _ in range(2))
    ours.scales[-1] *= 2
    found = agreement(ours, theirs, None)
    assert found.word == DIFFERS and found.where is not None and found.where.startswith("scales ")


def test_counters_that_torch_keeps_on_the_host_do_not_count() -> None:
    training = Training(make("AdamW", {}), by_torch()).run(SCENARIOS["clean"])
    (entry, *_) = training.optimizer.state.values()
    with host_syncs("cpu", training.optimizer) as syncs:
        entry["step"].item()
        entry["exp_avg"].sum().item()
    assert syncs.value == 1


def test_every_class_of_torch_optim_has_a_row_and_a_user_s_own() -> None:
    classes = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and name != "Optimizer"}
    assert set(choices()) == classes | {"Counting"}
    assert str(choices()["SGD"]) == "SGD(lr=0.1, momentum=0.9, dampening=0.5)"
    assert str(choices()["Counting"]) == "Counting, a user's own"


def test_a_new_optimizer_of_torch_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim, "Newest", type("Newest", (torch.optim.SGD,), {}), raising=False)
    assert choices()["Newest"].arguments == {}


def test_the_log_is_as_it_was(printed: tuple[dict[str, Any], str]) -> None:
    assert logging.getLogger("fxamp.optim").level == logging.NOTSET


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--optimizers", "AdamsW"], "(did you mean 'AdamW'?)"),
        (["--optimizers", ""], "accepted: Adadelta"),
        (["--lowering", "eager"], "'eager'"),
        (["--json", "--markdown"], "not allowed with"),
        (["--devic", "cpu"], "'--device'"),
        pytest.param(
            ["--device", "cuda"],
            "no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)
def test_a_wrong_option_is_one_clear_message(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = bench.main(["optimizers", *arguments])
    except SystemExit as stop:
        status = int(str(stop.code))
    printed, message = capsys.readouterr()
    assert status == 2 and named in message and not printed and message.count("\n") == 1
