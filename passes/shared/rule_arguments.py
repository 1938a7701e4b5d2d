"""Check the argument names in rules against the schemas of the ops that the rules name."""

from collections.abc import Iterator
from functools import cache

import torch

from fxamp.errors import PolicyError, nearest
from fxamp.policy import Rule
from fxamp.policy.model.op_names import is_glob
from fxamp.policy.model.site import KEPT, RESULT, RESULTS


@cache
def require_arguments(rule: Rule) -> None:
    """Raise PolicyError if ``rule`` names an argument that none of its ops has."""
    for _, mistake in unknown_arguments(rule):
        raise PolicyError(f"{f'{rule.origin}: ' if rule.origin else ''}rule {rule.id!r}: {mistake}")


def unknown_arguments(rule: Rule) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield each argument that ``rule`` names and none of its ops has: its key and name, and a message.

    Rules for all ops or with globs are not checked, nor are ops that are not registered in this process.
    """
    known = [_arguments(op) for op in rule.ops]
    if not known or any(is_glob(op) for op in rule.ops) or not all(known):
        return
    have = "has" if len(rule.ops) == 1 else "have"
    accepted = sorted(set().union(*known, [RESULT] if rule.region in (KEPT, RESULTS) else []))
    for key in ("args", "inputs"):
        for name in dict(getattr(rule, key, ())):
            if name not in accepted:
                yield (
                    (key, name),
                    f"{key} names {name!r}, but {' and '.join(rule.ops)} {have} no such argument; "
                    f"accepted: {', '.join(accepted)}{nearest(name, accepted)}",
                )


def _arguments(op: str) -> set[str]:
    """Return the names of all arguments of an op's overloads, or of one overload if it is named."""
    packet, _, overload = op.partition(".")
    schemas = torch._C._jit_get_schemas_for_operator(packet)
    named = {"": None, "default": ""}.get(overload, overload)
    return {a.name for s in schemas if named is None or s.overload_name == named for a in s.arguments if not a.is_out}
