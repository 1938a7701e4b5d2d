"""Golden texts: results as they are meant to be. ``FXAMP_ACCEPT=1`` writes what comes out now."""

import os
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "golden"


def assert_golden(name: str, text: str) -> None:
    """Compare ``text`` with the golden file ``name`` (a path below tests/golden), or accept it as the new one."""
    path, whole = FOLDER / f"{name}.txt", text.rstrip("\n") + "\n"
    if os.environ.get("FXAMP_ACCEPT") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(whole, encoding="utf-8")
    assert path.is_file(), f"{path} is missing: run with FXAMP_ACCEPT=1 to write it"
    assert whole == path.read_text(encoding="utf-8"), f"{path} differs: run with FXAMP_ACCEPT=1 if that is meant"
