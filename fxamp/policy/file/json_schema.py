"""The JSON Schema of policy files, for editors: ``python -m fxamp.policy.file.json_schema > policies/schema.json``.

Generated from the tables that the loader checks with, so an editor accepts the same keys and values. It cannot express
every rule (a circle of extends, an id used twice); ``fxamp-policy check`` checks those too.
"""

import json
from typing import Any

from fxamp.policy.file import schema
from fxamp.policy.model.chunks import LOSS
from fxamp.policy.model.conditions import DTYPES
from fxamp.policy.model.keep import KEPT, SMALLEST_BLOCK
from fxamp.policy.model.match import ARCHITECTURE, CPU_FEATURES
from fxamp.policy.model.optimizer_table import ROUNDING, STATE, WEIGHTS
from fxamp.policy.model.rule import INPUT_DTYPES, RULE_REGIONS

_TERM = r"\s*(>=|<=|==|!=|>|<)\s*{}\s*"
_SIZE, _VERSION = _TERM.replace("(", "(%|", 1).format(r"\d+"), _TERM.format(r"\d+(\.\d+)*")


def _listed(term: str) -> str:
    return f"^{term}(,{term})*$"


_SIZE_CONDITION = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": _listed(_SIZE)}]}
_STRINGS = {"type": "array", "items": {"type": "string"}}
_PLAIN = {"type": ["boolean", "integer", "number", "string"]}

_KINDS: dict[str, dict[str, Any]] = {
    schema.STRING: {"type": "string"},
    schema.STRINGS: _STRINGS,
    schema.SWITCH: {"type": "boolean"},
    schema.NUMBER: {"type": "number"},
    schema.COUNT: {"type": "integer", "minimum": 1},
    schema.SIZE: _SIZE_CONDITION,
    schema.COUNT_OR_WORD: {"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]},
}

_ARGUMENT = {
    "anyOf": [
        _PLAIN,
        {"type": "array", "items": _PLAIN},
        {
            "type": "object",
            "additionalProperties": False,
            "minProperties": 1,
            "properties": {
                "dtype": {"anyOf": [{"enum": list(DTYPES)}, {"type": "array", "items": {"enum": list(DTYPES)}}]},
                "rank": _SIZE_CONDITION,
                "size": _SIZE_CONDITION,
                "shape": {"type": "array", "items": {"anyOf": [{"enum": ["*", "..."]}, _SIZE_CONDITION]}},
            },
        },
    ]
}

_STATE = {"enum": list(STATE)}

#: What a table's keys accept where their kind alone does not tell.
_SPECIAL: dict[str, dict[str, Any]] = {
    "match": {
        "cpu_features": {"type": "array", "items": {"enum": list(CPU_FEATURES)}},
        "arch": {"type": "array", "items": {"type": "string", "pattern": f"^{ARCHITECTURE}$"}},
    },
    "optimizer": {
        "state": {"anyOf": [_STATE, {"type": "object", "additionalProperties": _STATE}]},
        "rounding": {"enum": list(ROUNDING)},
        "weights": {"enum": list(WEIGHTS)},
    },
}

_DESCRIPTIONS = {
    "extends": "Files that are read first, in this order; what is said later wins.",
    "match": "Where the policy holds.",
    "device": "The device that it is for.",
    "capability": "Compute capability of an NVIDIA GPU, such as '>=8.0'.",
    "arch": "Architectures of AMD GPUs, such as 'gfx950'.",
    "cpu_features": "Features that the CPU must have, as torch.cpu.get_capabilities() names them.",
    "lower_precision_fp": "The 16-bit dtype.",
    "unlisted": "What ops do that no rule covers.",
    "outputs": "The dtypes of a compiled graph's outputs.",
    "loss_scale": "Arguments of fxamp.GradScaler.",
    "optimizer": "In which precision a compiled optimizer keeps its state and the weights.",
    "state": "In what state is kept: for all, or by its name, with '*' for the others.",
    "rounding": "How state, and bfloat16 parameters, are rounded as they are written.",
    "weights": "kahan keeps beside each 16-bit parameter what its rounding has lost.",
    "rule": "The last rule whose conditions all hold decides a call.",
    "id": "A word that names the rule; a later file's rule of the same id takes its place.",
    "cast": "What happens to the floating-point inputs.",
    "recipe": "How cast = 'fp8' scales.",
    "why": "A sentence that is shown where the rule decides.",
    "ops": "Op names: mm, aten::sum.dim_IntList, mylib::op, conv*.",
    "modules": "Globs on module paths: lm_head, layers.*.router.",
    "module_classes": "Globs on class names: *RMSNorm.",
    "args": "Conditions on arguments by name: a value, or dtype, rank, size and shape of a tensor.",
    "reduces": "How many elements go into one result of a reduction: '>4096'.",
    "region": "Whether the rule is for ops of the forward, the backward, or both, or for what is kept between them.",
    "keep": "How the forward keeps a value for the backward; in place of cast, with region = 'kept'.",
    "chunks": "How many rows of logits exist at a time, or 'auto'; in place of cast, for losses of linear layers.",
    "gradients": "Whether the forward or the backward makes a chunk's gradients.",
    "block": "How many elements share a scale in 8 bits.",
    "elements": "How many elements the kept value has: '>=4096'.",
    "read_by": "Ops of which one at least reads the kept value in the forward.",
    "torch": "Versions of torch: '>=2.12'.",
    "inputs": "Dtypes of single arguments, others than cast gives.",
    "advice": "What the error of a banned op tells the user.",
    "enabled": "false removes the inherited rule of this id, or switches the loss scale off.",
}


def json_schema() -> dict[str, Any]:
    """Return the schema (JSON Schema, draft 7: what Taplo and Even Better TOML read)."""
    special: dict[str, Any] = {name: _object(keys, _SPECIAL.get(name)) for name, keys in schema.TABLES.items()}
    special["rule"] = {"type": "array", "items": _rule()}
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "fxamp policy"}
    return head | _object(schema.FILE_KEYS, special)


def _rule() -> dict[str, Any]:
    special = {
        "args": {"type": "object", "minProperties": 1, "additionalProperties": _ARGUMENT},
        "inputs": {"type": "object", "additionalProperties": {"enum": list(INPUT_DTYPES)}},
        "block": {"type": "integer", "minimum": SMALLEST_BLOCK},
    }
    on_ops = [region for region in RULE_REGIONS if region not in (KEPT, LOSS)]
    whole = {
        "anyOf": [{"required": [key]} for key in schema.CONDITIONS],
        "if": {"required": ["chunks"]},
        "then": {"properties": {"region": {"const": LOSS}}},
        "else": {
            "if": {"properties": {"region": {"const": KEPT}}, "required": ["region", "keep"]},
            "else": {"properties": {"region": {"enum": on_ops}}, "required": ["cast"]},
        },
    }
    off = {"properties": {"enabled": {"const": False}}, "required": ["enabled"]}
    return _object(schema.RULE_KEYS, special) | {"required": ["id"], "if": off, "else": whole}


def _object(keys: dict[str, str], special: dict[str, Any] | None = None) -> dict[str, Any]:
    properties = {key: _property(key, kind, special or {}) for key, kind in keys.items()}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _property(key: str, kind: str, special: dict[str, Any]) -> dict[str, Any]:
    about: dict[str, Any] = {"description": _DESCRIPTIONS[key]} if key in _DESCRIPTIONS else {}
    if key in special:
        about |= special[key]
        return about
    if key in schema.CHOICES:
        return about | {"enum": list(schema.CHOICES[key])}
    if key in ("torch", "capability"):
        return about | {"type": "string", "pattern": _listed(_VERSION)}
    return about | _KINDS[kind]


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=2))
