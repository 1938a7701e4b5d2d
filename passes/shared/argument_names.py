"""Check the argument names in rules against the schemas of the ops that the rules name."""

from functools import cache

import torch

from fxamp.errors import PolicyError, nearest
from fxamp.policy import Rule
from fxamp.policy.model.op_names import is_glob
from fxamp.policy.model.site import KEPT, RESULT, RESULTS


@cache
def require_arguments(rule: Rule) -> None:
    """Raise PolicyError if ``rule`` names an argument that none of its ops has.

    Rules for all ops or with globs are not checked, nor are ops that are not registered in this process.
    """
    known = [_arguments(op) for op in rule.ops]
    if not known or any(is_glob(op) for op in rule.ops) or not all(known):
        return
    accepted = sorted(set().union(*known, [RESULT] if rule.region in (KEPT, RESULTS) else []))
    for key in ("args", "inputs"):
        for name in dict(getattr(rule, key, ())):
            if name not in accepted:
                where, ops = f"{rule.origin}: " if rule.origin else "", " and ".join(rule.ops)
                raise PolicyError(
                    f"{where}rule {rule.id!r}: {key} names {name!r}, but {ops} has no such argument; "
                    f"accepted: {', '.join(accepted)}{nearest(name, accepted)}"
                )


def _arguments(op: str) -> set[str]:
    """Return the names of all arguments of an op's overloads, or of one overload if it is named."""
    packet, _, overload = op.partition(".")
    schemas = torch._C._jit_get_schemas_for_operator(packet)
    named = {"": None, "default": ""}.get(overload, overload)
    return {a.name for s in schemas if named is None or s.overload_name == named for a in s.arguments if not a.is_out}
