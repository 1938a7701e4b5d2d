"""Runs a tool's command in this process."""

from collections.abc import Callable, Sequence

import pytest

Main = Callable[[Sequence[str]], int]


def status_of(main: Main, arguments: Sequence[str]) -> int:
    """Return the status with which a command ends."""
    try:
        return main(arguments)
    except SystemExit as stop:  # of argparse
        assert isinstance(stop.code, int)
        return stop.code


def run_command(main: Main, arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Return the status, what is printed on stdout, and what on stderr."""
    status = status_of(main, arguments)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def mistake(main: Main, arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the message of a mistake: one line on stderr, status 2, and nothing on stdout."""
    status, out, err = run_command(main, arguments, capsys)
    assert (status, out) == (2, "") and err.count("\n") == 1, err
    return err
