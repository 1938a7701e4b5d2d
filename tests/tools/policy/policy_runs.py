"""Run fxamp-policy in a test, on a model file written for it."""

from pathlib import Path

import pytest

from fxamp.tools.policy.command import main


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "model.py"
    path.write_text(text)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Return the exit status, and what was printed on standard output and standard error."""
    try:
        status = main(arguments)
    except SystemExit as end:
        status = int(str(end.code))
    printed = capsys.readouterr()
    return status, printed.out, printed.err
