"""Progress: a live bar with rate and remaining time on a terminal, nothing elsewhere; Ctrl-C prints what was found."""

import io

import pytest

from fxamp.tools.common.command_line import guarded
from fxamp.tools.common.interrupt import SoFar, so_far
from fxamp.tools.common.progress import bar


def test_a_pipe_gets_nothing() -> None:
    stream = io.StringIO()
    with bar("rounds", 2, "round", stream) as shown:
        shown.update()
        shown.set_postfix_str("loss 2.5")
    assert stream.getvalue() == ""


def test_ctrl_c_prints_what_was_found_outer_parts_first(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        with so_far(lambda: "one"), so_far(lambda: ""), so_far(lambda: "two"):
            raise KeyboardInterrupt

    assert guarded("tool", work) == 130
    assert capsys.readouterr() == ("one\ntwo\n", "\ntool: interrupted\n")


def test_ctrl_c_before_anything_was_found_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        with so_far(lambda: ""):
            raise KeyboardInterrupt

    assert guarded("tool", work) == 130
    assert capsys.readouterr().out == "" and issubclass(SoFar, KeyboardInterrupt)


def test_what_ends_by_itself_is_left_alone() -> None:
    with so_far(lambda: "never"):
        pass
    with pytest.raises(ValueError, match="mine"), so_far(lambda: "never"):
        raise ValueError("mine")
