"""Golden texts: generated sources as they are meant to be. ``FXAMP_ACCEPT=1`` writes what is generated now."""

import os
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "golden" / "kernels"


def assert_golden(name: str, text: str) -> None:
    """Compare ``text`` with the golden text ``name``, or accept it as the new one."""
    path = FOLDER / f"{name}.txt"
    if os.environ.get("FXAMP_ACCEPT") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.is_file(), f"{path} is missing: run with FXAMP_ACCEPT=1 to write it"
    assert text == path.read_text(encoding="utf-8"), f"{path} differs: run with FXAMP_ACCEPT=1 if that is meant"
