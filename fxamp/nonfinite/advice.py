"""What to try: a rule of a policy file that keeps an op in float32."""

import json
from collections.abc import Sequence

from fxamp.graph_text import Entry

#: The 16-bit dtypes by their short names.
_NARROW = frozenset({"f16", "bf16"})


def rule_in_float32(entries: Sequence[Entry]) -> str:
    """Return the TOML of one rule that keeps the ops of ``entries`` in float32, in their modules alone.

    ``""`` if none of them is an op that a rule can name.
    """
    named = [entry for entry in entries if entry.target.partition("::")[0] not in ("higher_order", entry.target)]
    ops = list(dict.fromkeys(entry.target.rpartition(".")[0] for entry in named))
    if not ops:
        return ""
    modules = sorted({entry.module for entry in named})
    name = ops[0].rpartition("::")[2].strip("_")
    lines = ["[[rule]]", f'id = "{name}-in-float32"', 'cast = "fp32"', f"ops = {json.dumps(ops)}"]
    if all(modules):
        lines.append(f"modules = {json.dumps(modules)}")
    return "\n".join(lines)


def is_narrow(entry: Entry) -> bool:
    """Whether the value has 16 bits."""
    return entry.dtype in _NARROW
