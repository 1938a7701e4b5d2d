"""Every command with inputs and outputs that nobody should give: a named message and status 2, and no traceback."""

import errno
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.checks.commands import Main, status_of
from support.checks.exhaustive import exhaustive

from fxamp.tools.bench import command as bench
from fxamp.tools.common.command_line import FAULT, guarded
from fxamp.tools.common.output import visible
from fxamp.tools.demo import command as demo
from fxamp.tools.diff import command as diff
from fxamp.tools.policy import command as policy
from fxamp.tools.show import command as show

#: By name: the command, and its arguments; FILE is the file that it reads.
READERS: dict[str, tuple[Main, list[str]]] = {
    "show": (show.main, ["FILE"]),
    "show under a policy": (show.main, ["FILE", "--policy", "cpu-bfloat16"]),
    "show, trusting": (show.main, ["FILE", "--trust"]),
    "show's policy": (show.main, ["graph.txt", "--policy", "FILE"]),
    "diff's old": (diff.main, ["FILE", "cpu-bfloat16"]),
    "diff's new": (diff.main, ["cpu-bfloat16", "FILE"]),
    "diff's graph": (diff.main, ["cpu-bfloat16", "cpu-float16", "--graph", "FILE"]),
    "diff's run": (diff.main, ["cpu-bfloat16", "cpu-float16", "--run", "FILE"]),
    "check": (policy.main, ["check", "FILE"]),
    "policy show": (policy.main, ["show", "FILE"]),
    "explain": (policy.main, ["explain", "mm", "--policy", "FILE"]),
    "calibrate": (policy.main, ["calibrate", "FILE"]),
    "bisect": (policy.main, ["bisect", "FILE", "--tolerance", "1"]),
    "demo": (demo.main, ["--policy", "FILE", "--steps", "1"]),
}

GRAPH = """class GraphModule(torch.nn.Module):
    def forward(self, x: "f32[4, 4]"):
        w: "f32[4, 4]" = torch.ops.aten.relu.default(x)
        return (w,)
"""

CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "binary": bytes(range(256)) * 20,
    "zeros": bytes(5000),
    "latin-1": "# é\n".encode("latin-1"),
    "utf-16": "x = 1".encode("utf-16"),
    "archive": b"PK\x03\x04" + bytes(100),
    "deep": b"x = " + b"[" * 3000 + b"]" * 3000,
    "long line": b"x = '" + b"a" * 200_000 + b"'",
    "digits": b"x = " + b"9" * 6000,
    "control": b"\x1b]0;TITLE\x07\x1b[31m\x9b = 1\n",
    "unfinished": b'class GraphModule(torch.nn.Module):\n    def forward(self, x: "f32[4',
}

PAIRS = (["FILE", "cpu-bfloat16"], ["cpu-bfloat16", "FILE"])

ENDINGS = (".toml", ".txt", ".py", ".pt2", "")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("graph.txt").write_text(GRAPH)


@pytest.fixture(params=READERS)
def command(request: pytest.FixtureRequest) -> tuple[Main, list[str]]:
    return READERS[request.param]


def require_named(file: str, status: int, printed: pytest.CaptureFixture[str], accepted: Sequence[int]) -> None:
    out, err = printed.readouterr()
    assert status in accepted, (status, err)
    assert "Traceback" not in out + err
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", out + err)
    if status == 2:
        assert visible(file) in err or repr(file) in err, err


@pytest.mark.parametrize("content", exhaustive(CONTENTS, always=["binary", "control", "unfinished", "deep"]))
def test_strange_contents(content: str, command: tuple[Main, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    main, arguments = command
    for ending in ENDINGS:
        file = f"strange{ending}"
        Path(file).write_bytes(CONTENTS[content])
        status = status_of(main, [file if word == "FILE" else word for word in arguments])
        # Mistakes are status 1 of check; an empty table is a policy that differs.
        require_named(file, status, capsys, (1, 2) if "check" in arguments or arguments[:2] in PAIRS else (2,))


def test_what_is_no_file(command: tuple[Main, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    main, arguments = command
    for ending in ENDINGS:
        Path(f"folder{ending}").mkdir()
        Path(f"one{ending}").symlink_to(f"two{ending}")
        Path(f"two{ending}").symlink_to(f"one{ending}")
        os.mkfifo(f"pipe{ending}")
        names = [
            f"{name}{ending}" for name in ("folder", "one", "pipe", "none", "\0", "x" * 5000, "graph.txt/x", "\x1b[31m")
        ]
        for file in names:
            status = status_of(main, [file if word == "FILE" else word for word in arguments])
            require_named(file, status, capsys, (2,))


def test_a_file_that_may_not_be_read(
    command: tuple[Main, list[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main, arguments = command
    original = io.open

    def refuse(file: object, *args: object, **kwargs: object) -> object:
        if "secret" in str(file):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return original(file, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(io, "open", refuse)  # root may read everything
    for ending in ENDINGS:
        file = f"secret{ending}"
        Path(file).touch()
        status = status_of(main, [file if word == "FILE" else word for word in arguments])
        require_named(file, status, capsys, (2,))


WRITERS: dict[str, tuple[Main, list[str]]] = {
    "show": (show.main, ["graph.txt"]),
    "show as HTML": (show.main, ["graph.txt", "--format", "html"]),
    "show's help": (show.main, ["--help"]),
    "diff": (diff.main, ["cpu-bfloat16", "cpu-bfloat16"]),
    "git": (diff.main, ["--git", "a", "graph.txt", "x", "x", "graph.txt", "x", "x"]),
    "list": (policy.main, ["list"]),
    "check": (policy.main, ["check", "cpu-bfloat16"]),
    "policy show": (policy.main, ["show", "cpu-bfloat16"]),
    "explain": (policy.main, ["explain", "mm", "--policy", "cpu-bfloat16"]),
    "policy's help": (policy.main, ["--help"]),
    "bench's help": (bench.main, ["--help"]),
    "a measurement's help": (bench.main, ["cost", "--help"]),
    "demo's help": (demo.main, ["--help"]),
}


class _Broken(io.StringIO):
    """A stream whose every write fails."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("writer", WRITERS)
def test_a_standard_output_that_takes_nothing(
    writer: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main, arguments = WRITERS[writer]
    for stream, expected, words in (
        (None, 2, "standard output is closed"),
        (_Broken(errno.ENOSPC), 2, "standard output: No space left on device"),
        (_Broken(errno.EPIPE), 0, ""),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            exit_status = status_of(main, arguments)
        err = capsys.readouterr().err
        assert (exit_status, words in err, "Traceback" in err) == (expected, True, False), err


@pytest.mark.parametrize("writer", ["show", "diff", "check"])
def test_a_standard_error_that_takes_nothing(writer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    main, arguments = WRITERS[writer]
    for stream in (None, _Broken(errno.ENOSPC), _Broken(errno.EPIPE)):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stream)
            assert status_of(main, [*arguments[:1], "none.toml", "none.toml"]) == 2


OVERWRITERS: dict[str, tuple[Main, list[str]]] = {
    "a graph": (show.main, ["graph.txt", "--output", "graph.txt"]),
    "by a link": (show.main, ["graph.txt", "--output", "link.txt"]),
    "by another path": (show.main, ["graph.txt", "--output", "./folder/../graph.txt"]),
    "a policy of show": (show.main, ["graph.txt", "--policy", "mine.toml", "--output", "mine.toml"]),
    "a policy": (diff.main, ["mine.toml", "cpu-bfloat16", "--output", "mine.toml"]),
    "what a policy extends": (diff.main, ["mine.toml", "cpu-bfloat16", "--output", "base.toml"]),
    "a graph of diff": (diff.main, ["cpu-bfloat16", "cpu-float16", "--graph", "graph.txt", "--output", "graph.txt"]),
    "a model of diff": (diff.main, ["cpu-bfloat16", "cpu-float16", "--run", "model.py", "--output", "model.py"]),
    "a base of calibrate": (policy.main, ["calibrate", "model.py", "--policy", "mine.toml", "--output", "mine.toml"]),
    "a base of bisect": (
        policy.main,
        ["bisect", "model.py", "--tolerance", "1", "--policy", "mine.toml", "--output", "mine.toml"],
    ),
    "a policy of demo": (demo.main, ["--policy", "mine.toml", "--picture", "mine.toml"]),
}


@pytest.fixture
def sources() -> Iterator[None]:
    Path("folder").mkdir()
    Path("base.toml").write_text('extends = ["cpu-bfloat16"]\n')
    Path("mine.toml").write_text('extends = ["base.toml"]\n')
    Path("model.py").write_text("raise SystemExit('run')\n")
    Path("link.txt").symlink_to("graph.txt")
    before = {path: path.read_bytes() for path in Path().iterdir() if path.is_file()}
    yield
    assert {path: path.read_bytes() for path in Path().iterdir() if path.is_file()} == before


@pytest.mark.parametrize("name", OVERWRITERS)
@pytest.mark.usefixtures("sources")
def test_nothing_is_written_over_what_is_read(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main, arguments = OVERWRITERS[name]
    assert status_of(main, arguments) == 2
    assert "is a file that is read; accepted: another file" in capsys.readouterr().err


def test_a_loop_of_links_is_no_place_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    Path("one").symlink_to("two")
    Path("two").symlink_to("one")
    assert show.main(["graph.txt", "--output", "one"]) == 2
    assert "--output 'one': Too many levels of symbolic links" in capsys.readouterr().err
    assert Path("one").is_symlink()


def test_a_fault_of_the_tool_has_a_status_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise TypeError("\x1b[31m")

    assert guarded("fxamp-tool", fail) == FAULT
    err = capsys.readouterr().err
    assert "Traceback" in err and "fxamp-tool: a bug in fxamp" in err and "\x1b" not in err


def test_control_characters_are_shown() -> None:
    assert visible("a\tb\n\x1b[31m\x07\x9b\u202e\r") == "a\tb\n\\x1b[31m\\x07\\u009b\\u202e\\x0d"
    assert visible("\x1b[36mf16\x1b[0m \x1b]0;t\x07", colours=True) == "\x1b[36mf16\x1b[0m \\x1b]0;t\\x07"
    assert visible("é ☃ \u200d") == "é ☃ \u200d"


def test_tools_print_by_these_functions_alone() -> None:
    """A bare print obeys what a file's text says; only workers and progress, which print nothing of files, have one."""
    tools = Path(show.__file__).parents[1]
    bare = re.compile(r"(?<![\w.])print\(|sys\.std(?:out|err)\.write")
    allowed = {"common/output.py", "bench/cost/worker.py", "demo/columns.py", "demo/command.py"}
    files = {str(file.relative_to(tools)) for file in tools.rglob("*.py") if bare.search(file.read_text())}
    assert files <= allowed
