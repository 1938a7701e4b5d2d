"""What a step costs, exactly: nobody makes one heavier by accident.

``cost_budget.json`` holds bytes, memory and launches of each model, two layers of it, in float16 with a scaler, as
``fxamp-bench cost`` counts them: torch's, and fxamp's under the same autocast. To accept others:

    FXAMP_ACCEPT=1 pytest -n 0 -m "exhaustive or not exhaustive" tests/tools/bench/test_cost_budget.py
"""

import json
import os
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from support.checks.cost_counting import Counting
from support.checks.exhaustive import exhaustive

from fxamp.tools.bench.cost.hooks import prepare_torch
from fxamp.tools.bench.cost.process import count
from fxamp.tools.bench.cost.row import row
from fxamp.tools.bench.cost.workload import Way, Workload
from fxamp.tools.bench.models import MODELS
from fxamp.tools.bench.process import Process

README = Path(__file__).parents[3] / "tools/bench/README.md"
FILE = Path(__file__).with_name("cost_budget.json")
BUDGET: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {"versions": {}, "models": {}}
VERSIONS = {name: version(name).partition("+")[0] for name in ("torch", "transformers")}
ACCEPTING = os.environ.get("FXAMP_ACCEPT") == "1"
COLUMNS = ("forward", "backward", "step", "triton", "library", "outside", "kept", "peak")
STAGES = ("forward", "backward", "step")
HEAVY = ("gpt2-124m", "bert-base", "llama-1b", "vit-b", "resnet50")


def counted(counting: Counting, model: str, *ways: Way) -> list[dict[str, int]]:
    sizes = dict(MODELS[model].sizes["full"])
    sizes["depth" if "depth" in sizes else "layers"] = 2
    rows = [asdict(row(way.label, way.policy, counting(Workload(model, sizes=sizes), way))) for way in ways]
    return [{column: numbers[column] for column in COLUMNS} for numbers in rows]


@pytest.mark.parametrize("model", exhaustive(("mlp", *HEAVY), always=("mlp",)))
def test_a_step_costs_what_was_accepted(counting: Counting, model: str) -> None:
    if ACCEPTING:
        torch, ours = counted(counting, model, Way(), Way("auto"))
        BUDGET["models"][model] = {"torch": torch, "fxamp": ours}
        BUDGET["versions"] = VERSIONS
        FILE.write_text(json.dumps(BUDGET, indent=1, sort_keys=True) + "\n")
    elif BUDGET["versions"] != VERSIONS:
        pytest.skip(f"the budget is for {BUDGET['versions']}, and here are {VERSIONS}")
    else:
        (ours,) = counted(counting, model, Way("auto"))
    require_lighter(ours, BUDGET["models"][model]["torch"], 1.03 if model == "vit-b" else 1)
    assert ours == BUDGET["models"][model]["fxamp"], "run with FXAMP_ACCEPT=1 if that is meant"


@pytest.mark.parametrize("model", exhaustive(("gpt2-124m",), always=()))
def test_naming_what_is_not_finite_moves_at_most_a_tenth_more(model: str) -> None:
    """The whole model, extrapolated from two and four layers; what each layer moves is what a deep model costs."""
    sizes, moved = MODELS[model].sizes["full"], dict[str, list[int]]()
    for option in ("", "log"):
        with Process(prepare_torch, settings={"FXAMP_NONFINITE": option} if option else {}) as process:
            for layers in (2, 4):
                workload = Workload(model, dtype="bfloat16", sizes={**sizes, "layers": layers})
                done = process.ask(count, workload, Way("cuda-bfloat16"))
                moved.setdefault(option, []).append(sum(done.bytes(stage) for stage in STAGES))
    plain, watched = (two + (four - two) // 2 * (sizes["layers"] - 2) for two, four in moved.values())
    assert plain < watched <= 1.10 * plain


def require_lighter(ours: dict[str, int], torch: dict[str, int], memory: float) -> None:
    """Bytes of the forward and of the whole step, what is kept, most memory at once, and launches, each.

    ``memory``: how much more memory at once is accepted. In ViT's backward, where most is in use, the kernel that
    computes a gradient in float32 writes its 16-bit copy too; torch writes it when it has freed what that kernel reads.
    """
    for columns in (("forward",), STAGES, ("kept",), ("peak",), ("triton", "library", "outside")):
        most = memory if columns == ("peak",) else 1
        assert sum(ours[column] for column in columns) <= most * sum(torch[column] for column in columns), columns


@pytest.mark.parametrize("model", HEAVY)
def test_the_readme_shows_what_was_accepted(model: str) -> None:
    """The first two numbers of each cell: torch's, and fxamp's under the same autocast."""
    start = f"| `{model}` | float16 | all | "
    (line,) = (line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith(start))
    cells = [cell.strip().split(" / ") for cell in line.removeprefix(start).split("|")]
    columns = (
        (("forward", "backward", "step"), 1e9, "{:.2f}"),
        (("triton", "library", "outside"), 1, "{:.0f}"),
        (("kept",), 1e6, "{:.0f}"),
        (("peak",), 1e6, "{:.0f}"),
    )
    for cell, (summed, unit, form) in zip(cells, columns, strict=False):
        accepted = [BUDGET["models"][model][who] for who in ("torch", "fxamp")]
        assert cell[:2] == [form.format(sum(numbers[column] for column in summed) / unit) for numbers in accepted]
