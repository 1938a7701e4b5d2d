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
from fxamp.tools.bench.cost.kernels.rows import rows
from fxamp.tools.bench.cost.kernels.subjects import Subject, subjects

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


@pytest.mark.parametrize("arch", exhaustive(ARCHS, always=("sm_90",)))
@pytest.mark.parametrize("kernel", exhaustive(ALL, always=("check float16",)))
def test_machine_code_is_what_was_accepted(every: list[Subject], kernel: str, arch: str) -> None:
    if not ACCEPTING and BUDGET["versions"] != versions():
        pytest.skip(f"the budget is for {BUDGET['versions']}, and here are {versions()}")
    devices = [device for device in DEVICES if device.arch == arch]
    documents = [row.document() for subject in every if subject.name == kernel for row in rows(subject, devices)]
    counted = sorted(documents, key=_order)
    for row in counted:
        for other in counted:
            if row["device"] == other["device"]:
                require_good(row, other)
    if ACCEPTING:
        others = [row for row in BUDGET["rows"] if (row["kernel"], row["arch"]) != (kernel, arch)]
        BUDGET.update(versions=versions(), rows=sorted([*others, *counted], key=_order))
        lines = ",\n".join(json.dumps(row, sort_keys=True) for row in BUDGET["rows"])
        FILE.write_text(f'{{"versions": {json.dumps(BUDGET["versions"])},\n"rows": [\n{lines}\n]}}\n')
    accepted = [row for row in BUDGET["rows"] if (row["kernel"], row["arch"]) == (kernel, arch)]
    assert counted == accepted, "run with FXAMP_ACCEPT=1 if that is meant"


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["arch"], row["device"], row["kernel"], not row["aligned"]


def require_good(row: dict[str, Any], other: dict[str, Any]) -> None:
    """``other``: the same kernel for the same GPU, which may be aligned otherwise, and computes the same.

    Compilers may compute two float32 by one instruction, or one. No thread of a step computes in float64.
    """
    what = row["kernel"], row["device"], row["limit"]
    assert row["spills"] == 0 and row["moved"] == row["ideal"], what
    if row["bound"] is not None:
        assert row["once"]["FP64"] == row["instructions"]["FP64"] == 0, what
    if row["device"] == "H100" and row["kernel"] in GOALS:
        assert row["bound"] >= GOALS[row["kernel"]], what
    for unit, most in (("conversion", 1.1), ("FP32", 2.2)) if row["kernel"] in GOALS else ():
        assert row["instructions"][unit] <= most * other["instructions"][unit] + 1, (*what, unit)
