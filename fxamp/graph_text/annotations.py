"""The type annotations of torch's printed graphs: ``"f32[8, s77][77, 1]cuda:0"``, ``"Sym(s77)"``."""

import re
from functools import lru_cache

from fxamp.graph_text.model import TensorType

_DTYPE = re.compile(r"[a-z]+[0-9][a-z0-9_]*")
_SYMBOL = re.compile(r"Sym\((.*)\)", re.DOTALL)
#: Longer numbers are not sizes; int() rejects numbers from 4300 digits on.
_DIGITS = 100
_SUBCLASS = re.compile(r"[A-Za-z_]\w*\((.*)\)", re.DOTALL)
_OPENING, _CLOSING = "([{", ")]}"


@lru_cache(maxsize=4096)  # a graph has few distinct types
def tensor_type(text: str) -> TensorType | None:
    """Return the type that an annotation names, ignoring strides. None if it is not the type of one tensor.

    A subclass prints as ``"DTensor(f32[8, 16], S(0))"``; its type is that of the tensor inside.
    """
    subclass = _SUBCLASS.fullmatch(text)
    if subclass is not None:
        text = next(iter(_split(subclass[1])), "")
    dtype, bracket, rest = text.partition("[")
    if not bracket or not _DTYPE.fullmatch(dtype):
        return None
    end = _closing(rest)
    if end is None:
        return None
    device = rest[end + 1 :]
    if device.startswith("["):
        strides_end = _closing(device[1:])
        if strides_end is None:
            return None
        device = device[strides_end + 2 :]
    return TensorType(dtype, tuple(_size(size) for size in _split(rest[:end])), device.strip())


def symbol(text: str) -> str:
    """Return the symbolic number that an annotation names, ``""`` if it names none."""
    match = _SYMBOL.fullmatch(text)
    return match[1] if match else ""


def _size(text: str) -> int | str:
    return int(text) if text.isdecimal() and len(text) <= _DIGITS else text


def _closing(text: str) -> int | None:
    """Return the position of the bracket that closes the one before ``text``."""
    depth = 0
    for at, character in enumerate(text):
        if character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            if depth == 0:
                return at if character == "]" else None
            depth -= 1
    return None


def _split(text: str) -> list[str]:
    """Return the parts of ``text`` between commas outside brackets."""
    parts, depth, start = [], 0, 0
    for at, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if character == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts
