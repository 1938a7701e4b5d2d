"""The README's programs print what it says they print, and its commands and options exist."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from fxamp.backend.options import parse_options
from fxamp.errors import OptionError

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
#: A program is followed by what it prints; a file begins with its name.
PROGRAMS = [
    (body, after) for (kind, body), (next_kind, after) in pairwise(BLOCKS) if (kind, next_kind) == ("python", "text")
]
FILES = {match[1]: body for _, body in BLOCKS if (match := re.match(r"# (\w+\.(?:py|toml))\n", body))}
SESSIONS = [body for kind, body in BLOCKS if kind == "console"]


def test_there_are_programs() -> None:
    assert len(PROGRAMS) >= 2 and FILES and SESSIONS


@pytest.mark.inductor
@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_prints_what_the_readme_says(number: int, tmp_path: Path) -> None:
    program, expected = PROGRAMS[number]
    path = tmp_path / "program.py"
    path.write_text(program, encoding="utf-8")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected


@pytest.mark.parametrize("number", range(len(SESSIONS)))
def test_a_command_prints_what_the_readme_says(number: int, tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for command, expected in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", SESSIONS[number], re.MULTILINE):
        done = subprocess.run(
            shlex.split(command), capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PATH": path}
        )
        assert done.returncode in (0, 1), done.stderr
        assert done.stdout.rstrip() == expected.rstrip(), command


def test_its_commands_are_installed() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    named = set(re.findall(r"\bfxamp-[a-z]+\b", TEXT))
    assert named <= scripts.keys() | {"fxamp-demo.svg"}


def test_its_options_are_the_backends() -> None:
    named = set(re.findall(r"^\| .*?\|", TEXT, re.MULTILINE))
    options = {name for cell in named for name in re.findall(r'`"(\w+)"`', cell)}
    with pytest.raises(OptionError) as caught:
        parse_options({"nothing": 1})
    assert options == set(str(caught.value).partition("accepted: ")[2].split(", "))


def test_its_demo_table_has_the_demos_rows() -> None:
    from fxamp.tools.demo.table import _ROWS

    table = next(block for block in re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL) if "first loss" in block)
    for label in _ROWS:
        assert (label if isinstance(label, str) else label[0]) in table


def test_its_files_exist() -> None:
    for name in re.findall(r"`((?:policies|fxamp|passes|tools)/[\w/.]+\.(?:md|py))`", TEXT):
        assert (ROOT / name).is_file(), name
