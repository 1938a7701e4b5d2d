"""The command ``fxamp-show`` as a person and as a script meet it: formats, files, pipes, terminals."""

import errno
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from fcntl import ioctl
from pathlib import Path

import pytest
from support.programs.show_samples import gpt as gpt_listing
from support.programs.show_samples import input_entry, op, plain

from fxamp.graph_text import Entry, Listing
from fxamp.graph_text.write import write_listing
from fxamp.tools.show.command import main

ROOT = Path(__file__).parents[3]
RUN = [sys.executable, "-c", "import sys; from fxamp.tools.show.command import main; sys.exit(main())"]


@pytest.fixture
def gpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "gpt.txt"
    path.write_text(write_listing(gpt_listing()), encoding="utf-8")
    return str(path)


@pytest.fixture
def half(tmp_path: Path) -> str:
    path = tmp_path / "half.txt"
    path.write_text(write_listing(plain()), encoding="utf-8")
    return str(path)


def on_a_terminal(arguments: list[str], columns: int, more: Mapping[str, str]) -> str:
    """What the command writes when its standard output is a terminal of this many columns."""
    reader, writer = pty.openpty()
    ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "TERM": "xterm", "LANG": "C.UTF-8", **more}
    process = subprocess.Popen([*RUN, *arguments], stdout=writer, stderr=subprocess.DEVNULL, env=environment)
    os.close(writer)
    written = b""
    try:
        while chunk := os.read(reader, 65536):
            written += chunk
    except OSError as error:
        if error.errno != errno.EIO:  # which says that the terminal's other side is closed
            raise
    os.close(reader)
    assert process.wait() == 0
    return written.decode().replace("\r\n", "\n")


def test_data_goes_to_stdout_and_warnings_to_stderr(gpt: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = Path(gpt).read_text(encoding="utf-8")
    Path(gpt).write_text(text.replace(" region=f16", " region=f16 odd=1", 1), encoding="utf-8")
    assert main([gpt]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"graph 0 GPT, cast: {gpt}\n") and "Mean and variance are sums over many elements." in out
    assert err.startswith("fxamp-show: warning: ") and err.endswith("unknown key 'odd' in fxamp's comment\n")
    assert "\x1b" not in out and "…" not in out


def test_model_explorer(gpt: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([gpt, "--format", "model-explorer", "--only", "casts"]) == 0
    graphs = json.loads(capsys.readouterr().out)["graphs"]
    assert [node["id"] for node in graphs[0]["nodes"]] == ["norm_f16", "w_f16", "checkpoint"]


def test_check_exits_1_if_it_finds_something(gpt: str, half: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([half, "--check"]) == 1
    assert capsys.readouterr().out.endswith("1 finding\n")
    assert main([half, "--check", "--format", "json"]) == 1
    assert [finding["node"] for finding in json.loads(capsys.readouterr().out)["findings"]] == ["exp"]
    assert main([half, "--check", "--only", "casts"]) == 0
    assert capsys.readouterr().out == "no findings\n"
    assert main([gpt, "--check", "--module", "h.0"]) == 0
    assert capsys.readouterr().out == "no findings\n"


def test_one_graph_keeps_its_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "two.txt"
    path.write_text(2 * write_listing(plain()), encoding="utf-8")
    assert main([str(path), "--graph", "1"]) == 0
    assert capsys.readouterr().out.startswith("graph 1 Plain")


def test_a_terminal_gets_its_width_and_colours(gpt: str) -> None:
    for columns in (80, 130):
        text = on_a_terminal([gpt], columns, {})
        assert "\x1b[36mf16" in text
        assert max(map(len, on_a_terminal([gpt], columns, {"NO_COLOR": "1"}).split("\n\n")[2].splitlines())) <= columns


@pytest.mark.parametrize(
    ("more", "coloured"), [({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({"NO_COLOR": ""}, True)]
)
def test_a_terminal_without_colours(gpt: str, more: dict[str, str], coloured: bool) -> None:
    assert ("\x1b" in on_a_terminal([gpt], 100, more)) is coloured


def test_colours_can_be_forced_into_a_pipe(
    gpt: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    main([gpt])
    assert "\x1b[36mf16" in capsys.readouterr().out
    main([gpt, "--output", str(tmp_path / "out.txt")])
    assert "\x1b" not in (tmp_path / "out.txt").read_text(encoding="utf-8")
    monkeypatch.setenv("NO_COLOR", "1")
    main([gpt])
    assert "\x1b" not in capsys.readouterr().out


def test_a_reader_that_stops_reading_is_no_error(gpt: str) -> None:
    command = " ".join([sys.executable, "-c", f"'{RUN[2]}'", gpt, "--format", "json", "| head -1"])
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    end = Entry("output", "output", "output", call="(x0,)", inputs=("x0",))
    big = Listing("G", (*(input_entry(f"x{i}", "f32[4]") for i in range(5000)), end))
    Path(gpt).write_text(write_listing(big), encoding="utf-8")
    done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_output_is_written_whole(gpt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.txt"
    target.write_text("old", encoding="utf-8")
    target.chmod(0o640)
    assert main([gpt, "--output", str(target)]) == 0
    assert capsys.readouterr().out == ""
    assert target.read_text(encoding="utf-8").startswith("graph 0 GPT")
    assert target.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpt.txt", "out.txt"]


def test_output_that_cannot_be_written_leaves_nothing_behind(gpt: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert main([gpt, "--output", str(tmp_path / "folder")]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "gpt.txt"]


def test_every_op_of_a_large_graph_has_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count = 2000
    entries = [input_entry("n0", "f32[8, 8]")]
    for at in range(1, count):
        entries.append(
            op(f"n{at}", "aten::neg.default", (f"n{at - 1}",), "f32[8, 8]", module=f"h.{at // 100}", reason="r")
        )
    path = tmp_path / "big.txt"
    path.write_text(write_listing(Listing("G", tuple(entries), policy="p")), encoding="utf-8")
    assert main([str(path), "--width", "120", "--all"]) == 0
    assert capsys.readouterr().out.count("neg") >= count - 1


def test_a_pipe_is_written_to_and_a_link_is_followed_not_replaced(tmp_path: Path) -> None:
    from fxamp.tools.common.output import write_text

    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    link.symlink_to(file)
    file.write_text("before")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    write_text("through", str(pipe))
    write_text("after", str(link))

    assert os.read(reader, 100) == b"through" and pipe.is_fifo()
    assert link.is_symlink() and file.read_text() == "after"
    os.close(reader)
