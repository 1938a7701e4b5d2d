"""``python -m fxamp``: the policy that "auto" chooses here, and every tool that is installed."""

import os
import runpy
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from fxamp.__main__ import TOOLS, overview


@pytest.mark.parametrize(("units", "policy"), [({"avx512_bf16": True}, "cpu-bfloat16"), ({}, "float32, no casts")])
def test_it_shows_what_auto_takes(
    units: dict[str, bool], policy: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: units)
    lines = list(overview())
    assert any(line.startswith(f"  cpu     {policy}: ") for line in lines)
    assert f"  torch   {torch.__version__}" in lines
    assert not caplog.records


def test_a_reader_may_stop_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -m fxamp | head -1``."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        runpy.run_module("fxamp", run_name="__main__")


def test_it_names_every_command() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert set(TOOLS) == set(project["project"]["scripts"])
