"""``fxamp-bench all`` makes every measurement that a subcommand makes; what is no subcommand is answered."""

import argparse
import json
from pathlib import Path

import pytest

from fxamp.tools.bench import all as bench_all
from fxamp.tools.bench import command as bench
from fxamp.tools.bench.models import MODELS
from fxamp.tools.bench.report import Report


def test_every_subcommand_has_a_part() -> None:
    assert set(bench_all.PARTS) == set(bench.SUBCOMMANDS) - {"all"}


def test_every_part_writes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All defaults: what is measured, by which subcommand, with which options; nothing is measured here."""
    asked: dict[str, argparse.Namespace] = {}
    for part, module in bench_all.PARTS.items():

        def run(options: argparse.Namespace, say: object, part: str = part) -> Report:
            asked[f"{part} {getattr(options, 'model', '')} {getattr(options, 'dtype', '')}".strip()] = options
            return Report({"part": part}, "table", f"# {part}", chart="<svg/>" if part == "train" else None)

        monkeypatch.setattr(module, "run", run)
    assert bench.main(["all", "--output", str(tmp_path), "--device", "cuda"]) == 0
    trained = {f"train {model} {dtype}" for model in MODELS for dtype in ("float16", "bfloat16")}
    counted = {f"cost {model} {dtype}" for model in MODELS for dtype in ("float16", "bfloat16")}
    assert asked.keys() == trained | counted | {"check", "step", "kernels", "policies"}
    assert {asked[name].device for name in (*trained, "check", "step")} == {"cuda"}
    names = {path.name for path in tmp_path.iterdir()}
    assert {"step.json", "step.md", "train-mlp-float16.svg", "summary.md"} <= names
    summary = (tmp_path / "summary.md").read_text()
    assert all(f"# {part}" in summary for part in bench_all.PARTS)


def test_a_measurement_that_fails_makes_the_status_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_all.PARTS["step"], "run", lambda options, say: Report({}, "", "", failed=("AdamW",)))
    assert bench.main(["all", "--output", str(tmp_path), "--parts", "step"]) == 1


def test_a_step_without_a_graph_lowering_runs_op_by_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager is a lowering of models alone."""
    lowered = Report({}, "", "")
    monkeypatch.setattr(bench_all.PARTS["step"], "run", lambda options, say: _of(lowered, options))
    assert bench.main(["all", "--output", str(tmp_path), "--parts", "step", "--lowering", "eager"]) == 0
    assert json.loads((tmp_path / "step.json").read_text())["lowering"] == "aot_eager"


def _of(report: Report, options: argparse.Namespace) -> Report:
    return Report({"lowering": options.lowering}, report.table, report.markdown)


@pytest.mark.parametrize("name", ["optimizers", "passes", "show"])
def test_what_is_no_subcommand_is_answered_by_another(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([name, "--json"]) == 2
    said = capsys.readouterr().err
    assert repr(name) in said and "fxamp-" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "named"), [([], "usage"), (["polices"], "'policies'"), (["kernels", "--devic", "x"], "'--devic'")]
)
def test_a_wrong_call_is_one_clear_message(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = bench.main(arguments)
    except SystemExit as stop:
        status = int(str(stop.code))
    printed, message = capsys.readouterr()
    assert status == 2 and named in message and not printed
