"""The programs of every README print what it says they print, and the commands and options of the README exist."""

import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest

from fxamp.backend.options import parse_options
from fxamp.errors import OptionError
from fxamp.passes.sequences import FORWARD

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
READMES = (
    *("README.md", "fxamp/README.md", "passes/README.md"),
    *(f"tools/{tool}/README.md" for tool in ("demo", "diff", "show")),
)
BLOCKS = [
    block
    for name in READMES
    for block in re.findall(
        r"^```(\w*)\n(.*?)^```$", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
]
#: A program is followed by what it prints; a file begins with its name.
PROGRAMS = [
    (body, after) for (kind, body), (next_kind, after) in pairwise(BLOCKS) if (kind, next_kind) == ("python", "text")
]
FILES = {match[1]: body for _, body in BLOCKS if (match := re.match(r"# (\w+\.(?:py|toml))\n", body))}
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
SESSIONS = [body for kind, body in BLOCKS if kind == "console"]


def test_there_are_programs() -> None:
    assert len(PROGRAMS) >= 2 and FILES and SESSIONS


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that a program or command runs in, in this process: a new one takes seconds to import torch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)
    return tmp_path


@pytest.mark.inductor
@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_prints_what_the_readme_says(number: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, expected = PROGRAMS[number]
    path = folder / "program.py"
    path.write_text(program, encoding="utf-8")
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("number", range(len(SESSIONS)))
def test_a_command_prints_what_the_readme_says(
    number: int, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for command, expected in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", SESSIONS[number], re.MULTILINE):
        own_rules = ["--torch", "2.13"] if command.startswith("fxamp-diff ") else []  # an older torch has more of them
        monkeypatch.setattr(sys, "argv", [*shlex.split(command), *own_rules])
        assert _main(SCRIPTS[sys.argv[0]])() in (0, 1)
        assert capsys.readouterr().out.rstrip() == expected.rstrip(), command


def _main(script: str) -> Callable[[], int]:
    """The function that an installed script calls."""
    module, _, name = script.partition(":")
    main: Callable[[], int] = getattr(import_module(module), name)
    return main


def test_its_commands_are_installed() -> None:
    named = set(re.findall(r"\bfxamp-[a-z]+\b", TEXT))
    assert all(callable(_main(script)) for script in SCRIPTS.values())
    assert named <= SCRIPTS.keys() | {"fxamp-demo.svg"}


def test_its_options_are_the_backends() -> None:
    named = set(re.findall(r"^\| .*?\|", TEXT, re.MULTILINE))
    options = {name for cell in named for name in re.findall(r'`"(\w+)"`', cell)}
    with pytest.raises(OptionError) as caught:
        parse_options({"nothing": 1})
    assert options == set(str(caught.value).partition("accepted: ")[2].split(", "))


def test_its_demo_table_has_the_demos_rows() -> None:
    from fxamp.tools.demo.table import _ROWS

    table = next(block for kind, block in BLOCKS if kind == "text" and "first loss" in block)
    labels = [re.split(r"\s{2,}", line)[0] for line in table.splitlines()[2:]]
    of_the_scaler = {"loss scale at the end", "skipped steps"}  # the page's program has none
    assert labels == [label for label in _ROWS if label not in of_the_scaler]


def test_the_passes_of_the_page_are_those_of_the_sequences_in_their_order() -> None:
    page = (ROOT / "passes/README.md").read_text(encoding="utf-8")
    forward = re.findall(r"^\| ([a-z-]+) \|", page.partition("## The partition")[0], re.MULTILINE)
    assert [name for name in forward if name != "pass"] == [step.name for step in FORWARD]
    files = [path.stem.replace("_", "-") for path in (ROOT / "passes").glob("*/*.py") if path.parent.name != "shared"]
    assert [name for name in files if name != "--init--" and name not in page] == []
