"""Write a result to standard output, or atomically to a file."""

import io
import os
import sys
import tempfile
from pathlib import Path

from fxamp.errors import OptionError


def require_folder(file: str | None) -> None:
    """Raise OptionError if ``file`` cannot be written for lack of a folder; called before the work, not after it."""
    if file is None:
        return
    folder = Path(file).resolve().parent
    if not folder.is_dir():
        raise OptionError(f"--output {file!r}: there is no folder {folder}; accepted: a file in an existing folder")
    if not os.access(folder, os.W_OK | os.X_OK) and not Path(file).exists():
        raise OptionError(f"--output {file!r}: you may not write in {folder}; accepted: a file in another folder")


def write_text(text: str, file: str | None) -> None:
    """Write ``text`` to ``file``, or to standard output if None; a closed pipe (``| head``) is not an error.

    Raises OptionError if the file cannot be written; its previous content then remains.
    """
    if file is not None:
        return _write_file(text, Path(file))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for characters that the terminal's encoding lacks
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes stdout again at exit, and would report the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return None


def _write_file(text: str, given: Path) -> None:
    path = given.resolve()  # write through a symbolic link instead of replacing it
    if path.exists() and not path.is_file():
        return _write_into(text, given)  # a device or a pipe must not be replaced by a file
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise OptionError(f"--output {str(given)!r}: {error.strerror}") from error
    part = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        part.chmod(path.stat().st_mode if path.exists() else 0o666 & ~_umask())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OptionError(f"--output {str(given)!r}: {error.strerror}") from error
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return None


def _write_into(text: str, path: Path) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--output {str(path)!r}: {error.strerror}") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
