"""Conditions on torch's version, such as ``>=2.12`` or ``>=2.11,<2.13``."""

import re
from functools import cache
from importlib import metadata

from fxamp.errors import PolicyError
from fxamp.policy.model.comparisons import Comparison, meets, parse

ACCEPTED = "comparisons with >=, >, <=, <, == or != joined by commas, such as '>=2.12' or '>=2.11,<2.13'"


def parse_condition(text: str) -> tuple[Comparison, ...]:
    """Return the comparisons of ``text``, all of which must hold; raise ValueError if it is not a condition."""
    return parse(text, "version comparison", ACCEPTED)


def holds(condition: str, version: str) -> bool:
    """Return whether ``version`` meets ``condition``.

    Only the parts that the condition writes are compared: ``==2.13`` and ``<=2.13`` hold on 2.13.1. Local and
    pre-release suffixes (``+cpu``, ``a0``) are ignored.
    """
    return meets(parse_condition(condition), version_parts(version))


def version_parts(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: ``"2.13.0+cpu"`` gives ``(2, 13, 0)``."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    if match is None:
        raise PolicyError(f"{version!r} is not a torch version; accepted: numbers such as '2.13.0'")
    return tuple(int(number) for number in match[0].split("."))


@cache
def installed_torch_version() -> str:
    """Return the version of the installed torch, without importing it."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError as missing:
        raise PolicyError("torch is not installed: pass torch_version= to resolve the policy") from missing
