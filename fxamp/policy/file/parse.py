"""Read and check the text of one policy file."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from fxamp.errors import PolicyError
from fxamp.policy.file.check_file import PolicyFile, check_file
from fxamp.policy.file.lines import Path as KeyPath
from fxamp.policy.file.lines import index_lines
from fxamp.policy.file.paths import shown

#: The most bytes of a policy file.
LARGEST = 16 * 2**20


def read(path: Path) -> PolicyFile:
    """Return the content of the file at ``path``; raise PolicyError if it cannot be read as text."""
    try:
        with path.open("rb") as stream:
            content = stream.read(LARGEST + 1)
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PolicyError(f"{shown(path)}: not UTF-8 text: {error}") from error
    except OSError as error:
        raise PolicyError(f"{shown(path)}: {error.strerror}") from error
    if len(content) > LARGEST:
        raise PolicyError(f"{shown(path)}: it is larger than {LARGEST >> 20} MiB, too large for a policy file")
    return parse(text, shown(path))


def parse(text: str, name: str) -> PolicyFile:
    """Return the content of a file from its text. Mistakes call the file ``name``, and the caller may add more."""
    content = _checked(text, name)
    return replace(content, mistakes=[*content.mistakes])


@lru_cache(maxsize=64)
def _checked(text: str, name: str) -> PolicyFile:
    """Parse and check one file; if the TOML is malformed, that is its only mistake."""
    file = PolicyFile(name)
    try:
        data = tomllib.loads(text)
        lines = index_lines(text)
        large = next(_large_numbers(data, ()), None)
    except tomllib.TOMLDecodeError as error:
        file.mistake(_line_of(error, text), f"not TOML: {error}")
    except ValueError:  # an integer whose digits are too many for Python
        line, digits = _longest_number(text)
        file.mistake(line, f"a number has {digits} digits; accepted: numbers of 64 bits")
    except RecursionError:
        file.mistake(1, "its lists or tables are nested too deeply")
    else:
        if large is None:
            return check_file(name, data, lines)
        file.mistake(lines.line(large), f"{large[-1]} is too large a number; accepted: numbers of 64 bits")
    return file


def _large_numbers(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    """Yield the paths of the integers in a parsed TOML value that do not fit in 64 bits."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield path
    elif isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _large_numbers(item, (*path, key))


def _line_of(error: tomllib.TOMLDecodeError, text: str) -> int:
    match = re.search(r"at line (\d+)", str(error))
    return int(match[1]) if match else text.rstrip().count("\n") + 1


def _longest_number(text: str) -> tuple[int, int]:
    """Return the line and the length of the longest run of digits."""
    longest = max(re.finditer(r"[\d_]+", text), key=lambda run: len(run[0]))
    return text.count("\n", 0, longest.start()) + 1, len(longest[0])
