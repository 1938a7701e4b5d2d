"""Golden texts: results as they are meant to be. ``FXAMP_ACCEPT=1`` writes what comes out now."""

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def assert_golden(name: str, text: str) -> None:
    """Compare ``text`` with the golden file ``name`` (a path below tests/golden), or accept it as the new one."""
    path = FOLDER / f"{name}.txt"
    if os.environ.get("FXAMP_ACCEPT") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    assert path.is_file(), f"{path} is missing: run with FXAMP_ACCEPT=1 to write it"
    assert text.rstrip("\n") + "\n" == path.read_text(encoding="utf-8"), f"{path} differs: run with FXAMP_ACCEPT=1 if that is meant"
