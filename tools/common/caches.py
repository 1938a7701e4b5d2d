"""Where tools keep what took long to make."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder of fxamp's own caches: in Inductor's if that has a place of its own, else in the user's."""
    caches = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(caches) / "fxamp"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
