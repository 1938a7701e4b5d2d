"""Build the site of a call from command-line arguments."""

import tomllib
from collections.abc import Sequence
from typing import Any

from fxamp.errors import nearest
from fxamp.policy.model.conditions import CHECKS, DTYPES
from fxamp.policy.model.op_names import canonical
from fxamp.policy.model.site import Site, TensorFacts, Value


def site_from(
    op: str, module: str, classes: Sequence[str], region: str, arguments: Sequence[str], reduces: int | None
) -> Site:
    """Return the site; a fact that is not given is unknown, not absent. Raises ValueError for unreadable arguments.

    ``arguments``: ``dim=-1`` gives a value, ``self.size=4096`` a property of a tensor: dtype, rank, size or shape
    (``self.shape=2,3``).
    """
    values: dict[str, Value] = {}
    facts: dict[str, dict[str, Any]] = {}
    for text in arguments:
        name, _, written = text.partition("=")
        name, _, key = name.partition(".")
        if not written or not name:
            raise ValueError(f"--arg {text!r} is not an argument; accepted: such as dim=-1 or self.size=4096")
        if key:
            facts.setdefault(name, {})[key] = _fact(text, key, written)
        else:
            values[name] = _plain(written)
    args = values | {name: TensorFacts(**known) for name, known in facts.items()}
    return Site(canonical(op), module, tuple(classes), args, region, reduces, partial=True)


def _fact(text: str, key: str, written: str) -> Any:
    if key not in CHECKS:
        raise ValueError(f"--arg {text!r}: unknown {key!r}; accepted: {', '.join(CHECKS)}{nearest(key, CHECKS)}")
    if key == "dtype":
        if written not in DTYPES:
            accepted = f"accepted: {', '.join(DTYPES)}{nearest(written, DTYPES)}"
            raise ValueError(f"--arg {text!r}: unknown dtype {written!r}; {accepted}")
        return written
    numbers = written.strip("[]").split(",")
    if not all(number.strip().isdecimal() for number in numbers) or (key != "shape" and len(numbers) > 1):
        raise ValueError(f"--arg {text!r}: {written!r} is no {key}; accepted: whole numbers")
    sizes = tuple(int(number) for number in numbers)
    return sizes if key == "shape" else sizes[0]


def _plain(written: str) -> Value:
    """Return a TOML value; anything else is a string, so quotes can be left out."""
    try:
        value = tomllib.loads(f"value = {written}")["value"]
    except tomllib.TOMLDecodeError:
        return written
    return tuple(value) if isinstance(value, list) else value if isinstance(value, (bool, int, float)) else str(value)
