"""``fxamp-bench all`` makes every measurement that a subcommand makes."""

import argparse
import json
from pathlib import Path

import pytest

from fxamp.tools.bench import all as bench_all
from fxamp.tools.bench import command as bench
from fxamp.tools.bench import show as bench_show
from fxamp.tools.bench.report import Report
from fxamp.tools.bench.train.models import MODELS


def test_every_subcommand_has_a_part() -> None:
    assert set(bench_all.PARTS) == set(bench.SUBCOMMANDS) - {"all"}


def test_every_part_writes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All defaults: what is measured, by which subcommand, with which options; nothing is measured here."""
    asked: dict[str, argparse.Namespace] = {}
    for part in ("check", "train", "optimizers", "step", "kernels", "passes", "show", "cost", "policies"):

        def run(given: argparse.Namespace, say: object, part: str = part) -> Report:
            asked[f"{part} {getattr(given, 'model', '')} {getattr(given, 'dtype', '')}".strip()] = given
            return Report({"part": part}, "table", f"# {part}", chart="<svg/>" if part == "train" else None)

        monkeypatch.setattr(getattr(bench_all, part), "run", run)
    assert bench.main(["all", "--output", str(tmp_path), "--device", "cuda"]) == 0
    trained = {f"train {model} {dtype}" for model in MODELS for dtype in ("float16", "bfloat16")}
    counted = {f"cost {model} {dtype}" for model in MODELS for dtype in ("float16", "bfloat16")}
    others = {"check", "optimizers", "step", "kernels  float16", "kernels  float32", "passes", "show", "policies"}
    assert asked.keys() == trained | counted | others
    anywhere = counted | {"passes", "show", "policies"}
    assert {given.device for name, given in asked.items() if name not in anywhere} == {"cuda"}
    assert asked["optimizers"].optimizers is None
    names = {path.name for path in tmp_path.iterdir()}
    assert {"optimizers.json", "optimizers.md", "show.json", "passes.md", "kernels-float32.json"} <= names
    assert "train-mlp-float16.svg" in names and "summary.md" in names
    summary = (tmp_path / "summary.md").read_text()
    assert all(f"# {part}" in summary for part in bench_all.PARTS)


def test_a_measurement_that_fails_makes_the_status_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Report({}, "", "", failed=("AdamW",))
    monkeypatch.setattr(bench_all.optimizers, "run", lambda given, say: failed)
    assert bench.main(["all", "--output", str(tmp_path), "--parts", "optimizers"]) == 1


def test_optimizers_without_a_graph_lowering_run_op_by_op(tmp_path: Path) -> None:
    """Eager is a lowering of models alone."""
    options = "--parts optimizers --optimizers SGD --lowering eager"
    assert bench.main(["all", "--output", str(tmp_path), *options.split()]) == 0
    document = json.loads((tmp_path / "optimizers.json").read_text())
    assert document["lowering"] == "aot_eager" and [row["name"] for row in document["rows"]] == ["SGD"]


def test_passes_and_show_in_tiny_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_show, "RUNS", 1)
    assert bench.main(["all", "--output", str(tmp_path), "--parts", "passes,show", "--size", "tiny"]) == 0
    passes, show = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("passes", "show"))
    assert [chain["ops"] for chain in passes["chains"]] == [dump["ops"] for dump in show["dumps"]] == [100, 400]
    assert "| CPU time" in (tmp_path / "summary.md").read_text()
