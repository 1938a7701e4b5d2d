"""Store generated sources in files: Triton reads a kernel's source from its file, and users can read it there too."""

import functools
import hashlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """Return the folder for generated sources: next to Triton's own cache, which ``TRITON_CACHE_DIR`` can move."""
    triton_cache = os.environ.get("TRITON_CACHE_DIR")
    return (Path(triton_cache) if triton_cache else Path.home() / ".triton" / "cache") / "fxamp"


def write_source(name: str, text: str) -> Path:
    """Write ``text`` to a file named after ``name`` and a hash of the text, unless it exists; return the file's path.

    The write is atomic, so processes can share the folder.

    Raises:
        OSError: the cache folder cannot be written.
    """
    folder = cache_folder()
    path = folder / f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:16]}.py"
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return path
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=folder, suffix=".tmp", delete=False) as file:
        file.write(text)
    Path(file.name).replace(path)
    return path


@functools.cache
def load_function(name: str, text: str) -> Any:
    """Return the function ``name`` of the module whose source is ``text``, imported from its file.

    Raises:
        OSError: the cache folder cannot be written.
    """
    path = write_source(name, text)
    spec = importlib.util.spec_from_file_location(f"fxamp_generated_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)
