"""The machine code of the generated kernels, counted: nobody makes one heavier by accident.

``kernel_budget.json`` holds what ``fxamp-bench kernels`` counts. To accept others:

    FXAMP_ACCEPT=1 pytest -n 0 -m "exhaustive or not exhaustive" tests/tools/bench/test_kernel_budget.py
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.checks.exhaustive import exhaustive

pytest.importorskip("triton", reason="machine code needs triton's compiler")

from fxamp.tools.bench.cost.kernels.command import versions
from fxamp.tools.bench.cost.kernels.devices import DEVICES
from fxamp.tools.bench.cost.kernels.rows import NOTE, rows, table
from fxamp.tools.bench.cost.kernels.subjects import Subject, subjects

README = Path(__file__).parents[3] / "tools/bench/README.md"
FILE = Path(__file__).with_name("kernel_budget.json")
BUDGET: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {"versions": {}, "rows": []}
ACCEPTING = os.environ.get("FXAMP_ACCEPT") == "1"
ARCHS = tuple(dict.fromkeys(device.arch for device in DEVICES))
GOALS = {
    "check float16": 0.9,
    "check float32": 0.9,
    "unscale float32": 0.9,
    "float16 to float32": 0.9,
    "bfloat16 to float32": 0.9,
    "float16 to float32, norm": 0.9,
    "SGD, momentum": 0.9,
    "AdamW": 0.9,
    "AdamW, bfloat16 state": 0.85,
    "AdamW, 8bit state": 0.85,
    "AdamW, bfloat16 state, stochastic": 0.75,
    "AdamW, 8bit state, stochastic": 0.75,
    "AdamW, bfloat16, 8bit state, stochastic": 0.75,
}
#: Kernels that handle no elements.
SMALL = ("scale update", "AdamW, 0-dim values")
ALL = (*GOALS, *SMALL)


@pytest.fixture(scope="module")
def every() -> list[Subject]:
    return subjects()


def accepted(arch: str, **values: Any) -> list[dict[str, Any]]:
    own = [row for row in BUDGET["rows"] if row["arch"] == arch]
    return [row for row in own if all(row[name] == value for name, value in values.items())]


@pytest.mark.parametrize("arch", exhaustive(ARCHS, always=("sm_90",)))
@pytest.mark.parametrize("kernel", exhaustive(ALL, always=("check float16",)))
def test_machine_code_is_what_was_accepted(every: list[Subject], kernel: str, arch: str) -> None:
    if not ACCEPTING and BUDGET["versions"] != versions():
        pytest.skip(f"the budget is for {BUDGET['versions']}, and here are {versions()}")
    devices = [device for device in DEVICES if device.arch == arch]
    documents = [row.document() for row in rows([subject for subject in every if subject.name == kernel], devices)]
    counted = sorted(documents, key=_order)
    if ACCEPTING:
        others = [row for row in BUDGET["rows"] if (row["kernel"], row["arch"]) != (kernel, arch)]
        BUDGET.update(versions=versions(), rows=sorted([*others, *counted], key=_order))
        FILE.write_text(json.dumps(BUDGET, indent=1, sort_keys=True) + "\n")
    assert counted == accepted(arch, kernel=kernel), "run with FXAMP_ACCEPT=1 if that is meant"


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["arch"], row["device"], row["kernel"], not row["aligned"]


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("kernel", GOALS)
def test_an_h100_s_bandwidth_can_be_used(kernel: str, aligned: bool) -> None:
    (row,) = accepted("sm_90", device="H100", kernel=kernel, aligned=aligned)
    assert row["bound"] >= GOALS[kernel], row["limit"]


@pytest.mark.parametrize("arch", ARCHS)
def test_nothing_is_spilled_and_no_byte_moves_twice(arch: str) -> None:
    assert accepted(arch)
    for row in accepted(arch):
        assert row["spills"] == 0, row["kernel"]
        assert row["moved"] == row["ideal"], row["kernel"]


@pytest.mark.parametrize("kernel", GOALS)
@pytest.mark.parametrize("arch", ARCHS)
def test_the_same_is_computed_whether_aligned_or_not(arch: str, kernel: str) -> None:
    """Else the reader has lost code. The compilers may compute two float32 by one instruction, or one."""
    counts = [accepted(arch, kernel=kernel, aligned=aligned)[0]["instructions"] for aligned in (True, False)]
    for unit, most in (("conversion", 1.1), ("FP32", 2.2)):
        low, high = sorted(count[unit] for count in counts)
        assert high <= most * low + 1, unit


def test_no_thread_of_a_step_computes_in_float64() -> None:
    for row in BUDGET["rows"]:
        if row["bound"] is not None:
            assert row["once"]["FP64"] == row["instructions"]["FP64"] == 0, (row["kernel"], row["arch"])


def test_the_readme_shows_what_was_accepted() -> None:
    text = README.read_text(encoding="utf-8")
    assert table(shown(), markdown=True).removesuffix(NOTE).strip() in text


def shown() -> list[dict[str, Any]]:
    """Of one GPU; the kernels in the order of the command."""
    own = accepted("sm_90", device="H100")
    return sorted(own, key=lambda row: (ALL.index(row["kernel"]), not row["aligned"]))
