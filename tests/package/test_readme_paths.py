"""Every relative link of a README, and every path that it names, leads to a file that is in the repository."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]

#: A link or picture, without its anchor; and a path in backticks: it has a slash, and ends in one or in a suffix.
_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)[^)]*\)")
_PATH = re.compile(r"`(?!/)((?:[\w.-]+/)+(?:[\w-]+\.(?:py|md|toml|json|png|js|css|html|txt))?)`")


def tracked() -> set[str]:
    """The files under version control; in a copy without a history those that are there."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return set(listed.stdout.split("\0")) - {""}
    return {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.is_file()}


def readmes() -> list[str]:
    return sorted(name for name in tracked() if name.endswith(".md"))


def targets(text: str) -> set[str]:
    """The relative links and paths in a README, without the code that it shows."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return {*_LINK.findall(text), *_PATH.findall(prose)}


def places(readme: str, target: str) -> Iterator[str]:
    """Where ``target`` may be: beside the README, or below the root."""
    for folder in (PurePosixPath(readme).parent, PurePosixPath()):
        parts: list[str] = []
        for part in (folder / target).parts:
            parts = parts[:-1] if part == ".." else [*parts, part]
        yield "/".join(parts)


def is_there(place: str, files: set[str]) -> bool:
    """Whether ``place`` is a file or a folder with files; passes, policies and tools are links inside the package."""
    real = (ROOT / place).resolve()
    name = real.relative_to(ROOT.resolve()).as_posix() if real.is_relative_to(ROOT.resolve()) else place
    return name in files or any(file.startswith(f"{name}/") for file in files)


@pytest.mark.parametrize("readme", readmes())
def test_what_a_readme_names_is_in_the_repository(readme: str) -> None:
    files = tracked()
    named = targets((ROOT / readme).read_text(encoding="utf-8"))
    missing = [
        target for target in sorted(named) if not any(is_there(place, files) for place in places(readme, target))
    ]
    assert not missing, f"{readme} names {', '.join(missing)}"


def test_links_and_paths_are_recognized() -> None:
    text = "![x](tools/a.png) [y](../b.md#z) [z](https://c.org/d.md) `e/f.py` `g/` `h.py`\n```\n`i/j.py`\n```\n"
    assert targets(text) == {"tools/a.png", "../b.md", "e/f.py", "g/"}
    assert list(places("k/README.md", "../b.md")) == ["b.md", "b.md"]
