"""Write a result to standard output, or atomically to a file; and messages to standard error.

What is printed may come from anyone's file, so control characters in it are shown, not obeyed.
"""

import contextlib
import errno
import io
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import TextIO

from fxamp.errors import OptionError
from fxamp.policy.file.paths import is_file, is_folder
from fxamp.tools.common.terminal import COLOURED, is_colourful

#: Characters that move a cursor, change a terminal, or reorder the text around them.
_OBEYED = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_CONTROL = re.compile(f"[{_OBEYED}]")
_CONTROL_OR_COLOUR = re.compile(f"({COLOURED})|[{_OBEYED}]")


def visible(text: str, colours: bool = False) -> str:
    """Return ``text`` with control characters, except line ends and tabs, as escapes, ``"\\x1b"``.

    ``colours``: the codes that :class:`fxamp.tools.common.terminal.Look` writes stay as they are.
    """
    if colours:
        return _CONTROL_OR_COLOUR.sub(lambda character: character[1] or _escape(character), text)
    return _CONTROL.sub(_escape, text)


def _escape(character: re.Match[str]) -> str:
    code = ord(character[0])
    return f"\\x{code:02x}" if code < 32 else f"\\u{code:04x}"  # as in JSON


def require_folder(file: str | None, *inputs: str | None, option: str = "--output") -> None:
    """Raise OptionError if ``file`` is a folder or lies in none, or is one of ``inputs``, which are read.

    It is called before the work, not after it.
    """
    if file is None:
        return
    for source in inputs:
        if source is not None and is_file(file) and is_file(source) and Path(file).samefile(source):
            raise OptionError(f"{option} {file!r} is a file that is read; accepted: another file")
    if is_folder(file):
        raise OptionError(f"{option} {file!r} is a folder; accepted: a file")
    folder = Path(os.path.realpath(file)).parent
    if not folder.is_dir():
        raise OptionError(f"{option} {file!r}: there is no folder {folder}; accepted: a file in an existing folder")
    if not os.access(folder, os.W_OK | os.X_OK) and not Path(file).exists():
        raise OptionError(f"{option} {file!r}: you may not write in {folder}; accepted: a file in another folder")


def write_text(text: str, file: str | None = None) -> None:
    """Write ``text`` to ``file``, or to standard output if None; a closed pipe (``| head``) is not an error.

    Raises OptionError if it cannot be written; a file's previous content then remains.
    """
    if file is not None:
        return _write_file(text, Path(file))
    stream = sys.stdout
    if stream is None:
        raise OptionError("standard output is closed; accepted: an open one")
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # for characters that the terminal's encoding lacks
    try:
        stream.write(visible(text, is_colourful(stream)))
        stream.flush()
    except BrokenPipeError:
        _abandon(stream)
    except OSError as error:
        _abandon(stream)
        raise OptionError(f"standard output: {error.strerror or error}") from error
    return None


def put(text: str) -> None:
    """Write ``text`` and a line end to standard output, as :func:`write_text`."""
    write_text(f"{text}\n")


def notice(text: str) -> None:
    """Write a line to standard error, if that is open and can be written."""
    if sys.stderr is None:
        return
    with contextlib.suppress(OSError):  # there is no other place to say it
        sys.stderr.write(f"{visible(text)}\n")
        sys.stderr.flush()


def _abandon(stream: TextIO) -> None:
    """Redirect a stream that cannot be written to the null device: the interpreter flushes it again at exit."""
    with contextlib.suppress(io.UnsupportedOperation):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _write_file(text: str, file: Path) -> None:
    path = Path(os.path.realpath(file))  # write through a symbolic link instead of replacing it
    if path.is_symlink():
        raise OptionError(f"--output {str(file)!r}: {os.strerror(errno.ELOOP)}")
    try:
        if path.exists() and not path.is_file():
            file.write_text(text, encoding="utf-8")  # a device or a pipe must not be replaced by a file
        else:
            _replace(path, text)
    except OSError as error:
        raise OptionError(f"--output {str(file)!r}: {error.strerror or error}") from error


def _replace(path: Path, text: str) -> None:
    """Let ``path`` be a file with ``text``; it is the previous one until all of ``text`` is written."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    part = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        part.chmod(path.stat().st_mode if path.exists() else 0o666 & ~_umask())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
