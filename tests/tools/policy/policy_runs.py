"""Run fxamp-policy in a test, on a model file written for it."""

from pathlib import Path

import pytest
from support.checks.commands import run_command

from fxamp.tools.policy.command import main


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "model.py"
    path.write_text(text)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Return the exit status, and what was printed on standard output and standard error."""
    return run_command(main, arguments, capsys)
