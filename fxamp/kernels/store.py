"""Store generated sources in files: Triton reads a kernel's source from its file, and users can read it there too."""

import functools
import hashlib
import linecache
import os
import stat
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """Return the folder for generated sources: next to Triton's own cache, which ``TRITON_CACHE_DIR`` can move."""
    triton_cache = os.environ.get("TRITON_CACHE_DIR")
    return (Path(triton_cache) if triton_cache else Path.home() / ".triton" / "cache") / "fxamp"


def write_source(name: str, text: str) -> Path:
    """Write ``text`` to a file named after ``name`` and a hash of the text, unless it exists; return the file's path.

    The write is atomic, so processes can share the folder. Nobody but the user may write to it.

    Raises:
        OSError: the cache folder cannot be written, or belongs to another user.
    """
    folder = cache_folder()
    path = folder / f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:16]}.py"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _keep_private(folder)
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return path
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=folder, suffix=".tmp", delete=False) as file:
        file.write(text)
    Path(file.name).replace(path)
    return path


def _keep_private(folder: Path) -> None:
    """Remove other users' permission to write to ``folder``; raise PermissionError if it belongs to another user."""
    if not hasattr(os, "getuid"):
        return
    status = folder.stat()
    if status.st_uid not in (os.getuid(), 0):
        raise PermissionError(
            f"the folder of generated kernels, {folder}, belongs to another user (id {status.st_uid}), who could "
            "change them; accepted: a folder of your own, by the environment variable TRITON_CACHE_DIR"
        )
    if status.st_uid == os.getuid() and status.st_mode & _OTHERS_WRITE:
        folder.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS_WRITE)


@functools.cache
def load_function(name: str, text: str, interpret: bool = False) -> Any:
    """Return the function ``name`` of the module whose source is ``text``; ``interpret``: for Triton's interpreter.

    The function comes from ``text``, even if the file or a compiled file beside it has changed. Triton and tracebacks
    look up source lines by the file's path, so Python's ``linecache`` gets ``text`` for that path.

    Raises:
        OSError: the cache folder cannot be written, or belongs to another user.
    """
    path = write_source(name, text)
    module = ModuleType(f"fxamp_generated_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))  # None: never read again
    exec(compile(text, str(path), "exec"), vars(module))
    function = getattr(module, name)
    if not interpret:
        return function
    from fxamp.kernels.interpreter import Interpreted

    return Interpreted(function)
