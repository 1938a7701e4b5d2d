"""Progress: a live bar with rate and remaining time on a terminal, nothing elsewhere; Ctrl-C prints what was found."""

import io
import os
import pty
import re
import struct
import termios
import time
from fcntl import ioctl

import pytest

from fxamp.tools.common.command_line import guarded
from fxamp.tools.common.interrupt import SoFar, so_far
from fxamp.tools.common.progress import bar


def test_a_terminal_gets_a_bar_with_its_rate_and_the_time_left() -> None:
    reader, writer = pty.openpty()
    ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    with os.fdopen(writer, "w") as terminal, bar("rounds", 4, "round", terminal) as shown:
        for _ in range(3):
            time.sleep(0.11)
            shown.update()
        text = os.read(reader, 65536).decode()
    os.close(reader)
    assert re.search(r"rounds: +\d+%.*[23]/4 \[00:00<00:00, +[\d.]+round/s\]", text), text


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
