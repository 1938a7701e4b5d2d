"""The keys of a policy file: what each is for, and what it accepts.

The loader checks files with these tables, and :mod:`fxamp.policy.file.json_schema` writes them for editors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fxamp.policy.model.category import Category
from fxamp.policy.model.chunks import GRADIENTS, chunks_of
from fxamp.policy.model.comparisons import size_condition, version_condition
from fxamp.policy.model.conditions import DTYPES, ArgCondition
from fxamp.policy.model.keep import SMALLEST_BLOCK, Keep
from fxamp.policy.model.match import ARCHITECTURE, CPU_FEATURES, architecture, capability_condition, cpu_feature
from fxamp.policy.model.module_globs import class_glob, module_glob
from fxamp.policy.model.op_names import canonical
from fxamp.policy.model.optimizer_table import ROUNDING, STATE, WEIGHTS
from fxamp.policy.model.recipe import Recipe
from fxamp.policy.model.rule import INPUT_DTYPES, RULE_REGIONS
from fxamp.policy.model.settings import ACCEPTED_VALUES


@dataclass(frozen=True)
class Kind:
    """What a value is: in words; its types, and those of the items of a list or table; as JSON Schema."""

    words: str
    types: tuple[type, ...]
    json: Mapping[str, Any] = field(default_factory=dict)
    items: tuple[type, ...] = ()

    def holds(self, value: object) -> bool:
        """Return whether a parsed TOML value is of this kind."""
        if isinstance(value, bool) or not isinstance(value, self.types):
            return isinstance(value, bool) and bool in self.types
        items = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
        return not self.items or all(isinstance(item, self.items) for item in items)


@dataclass(frozen=True)
class Key:
    """One key.

    ``about``: what it is for. ``choices``: the accepted values, if they are few. ``parse``: returns the canonical form
    of a value, or of each item of a list or table, or raises ValueError.
    """

    kind: Kind
    about: str = ""
    choices: tuple[str, ...] = ()
    parse: Callable[[Any], Any] | None = None


def _comparisons(number: str, signs: str = "") -> str:
    term = rf"\s*({signs}>=|<=|==|!=|>|<)\s*{number}\s*"
    return f"^{term}(,{term})*$"


def _enum(values: tuple[str, ...]) -> dict[str, Any]:
    return {"enum": list(values)}


_LIST: dict[str, Any] = {"type": "array"}
_TEXTS = {"type": "array", "items": {"type": "string"}}
_PLAIN = {"type": ["boolean", "integer", "number", "string"]}
_SIZES = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": _comparisons(r"\d+", signs="%|")}]}
_TENSOR = {
    "dtype": {"anyOf": [_enum(DTYPES), _LIST | {"items": _enum(DTYPES)}]},
    "rank": _SIZES,
    "size": _SIZES,
    "shape": _LIST | {"items": {"anyOf": [_enum(("*", "...")), _SIZES]}},
}
_TABLE_OF_CONDITIONS = {"type": "object", "additionalProperties": False, "minProperties": 1, "properties": _TENSOR}
_ARGUMENT = {"anyOf": [_PLAIN, _LIST | {"items": _PLAIN}, _TABLE_OF_CONDITIONS]}

STRING = Kind("a string", (str,), {"type": "string"})
VERSIONS = Kind("a string", (str,), {"type": "string", "pattern": _comparisons(r"\d+(\.\d+)*")})
STRINGS = Kind("a list of strings", (list,), _TEXTS, items=(str,))
FEATURES = Kind("a list of strings", (list,), _LIST | {"items": _enum(CPU_FEATURES)}, items=(str,))
ARCHITECTURES = Kind(
    "a list of strings", (list,), _LIST | {"items": {"type": "string", "pattern": f"^{ARCHITECTURE}$"}}, items=(str,)
)
SWITCH = Kind("true or false", (bool,), {"type": "boolean"})
NUMBER = Kind("a number", (int, float), {"type": "number"})
COUNT = Kind("a whole number", (int,), {"type": "integer", "minimum": 1})
BLOCK = Kind("a whole number", (int,), {"type": "integer", "minimum": SMALLEST_BLOCK})
COUNT_OR_AUTO = Kind("a whole number, or a string", (int, str), {"anyOf": [COUNT.json, {"const": "auto"}]})
SIZE = Kind("a whole number, or a string such as '>64'", (int, str), _SIZES)
FORMS = Kind(
    "a string, or a table of strings",
    (str, dict),
    {"anyOf": [_enum(STATE), {"type": "object", "additionalProperties": _enum(STATE)}]},
    items=(str,),
)
TABLE = Kind("a table", (dict,))
ARGUMENTS = Kind("a table", (dict,), {"type": "object", "minProperties": 1, "additionalProperties": _ARGUMENT})
DTYPES_BY_NAME = Kind("a table", (dict,), {"type": "object", "additionalProperties": _enum(INPUT_DTYPES)})
TABLES_IN_LIST = Kind("a list of tables, each [[rule]]", (list,), items=(dict,))

FILE_KEYS = {
    "extends": Key(STRINGS, "Files that are read first, in this order; what is said later wins."),
    "match": Key(TABLE, "Where the policy holds."),
    "lower_precision_fp": Key(STRING, "The 16-bit dtype.", ACCEPTED_VALUES["lower_precision_fp"]),
    "unlisted": Key(STRING, "What ops do that no rule covers.", ACCEPTED_VALUES["unlisted"]),
    "outputs": Key(STRING, "The dtypes of a compiled graph's outputs.", ACCEPTED_VALUES["outputs"]),
    "loss_scale": Key(TABLE, "Arguments of fxamp.GradScaler."),
    "optimizer": Key(TABLE, "In which precision a compiled optimizer keeps state and weights, and when it steps."),
    "rule": Key(TABLES_IN_LIST, "The last rule whose conditions all hold decides a call."),
}

_VERSIONS_OF_TORCH = Key(VERSIONS, "Versions of torch: '>=2.12'.", parse=version_condition)
_ENABLED = Key(SWITCH, "false removes the inherited rule of this id, or switches the loss scale off.")

TABLES = {
    "match": {
        "device": Key(STRING, "The device that it is for.", ACCEPTED_VALUES["device"]),
        "capability": Key(
            VERSIONS, "Compute capability of an NVIDIA GPU, such as '>=8.0'.", parse=capability_condition
        ),
        "arch": Key(ARCHITECTURES, "Architectures of AMD GPUs, such as 'gfx950'.", parse=architecture),
        "cpu_features": Key(
            FEATURES,
            "Features that the CPU must have, as torch.cpu.get_capabilities() names them.",
            parse=cpu_feature,
        ),
        "torch": _VERSIONS_OF_TORCH,
    },
    "loss_scale": {
        **dict.fromkeys(("init_scale", "growth_factor", "backoff_factor"), Key(NUMBER)),
        "growth_interval": Key(COUNT),
        **dict.fromkeys(("min_scale", "max_scale"), Key(NUMBER)),
        "enabled": _ENABLED,
    },
    "optimizer": {
        "state": Key(FORMS, "In what state is kept: for all, or by its name, with '*' for the others."),
        "rounding": Key(STRING, "How state, and bfloat16 parameters, are rounded as they are written.", ROUNDING),
        "weights": Key(STRING, "kahan keeps beside each 16-bit parameter what its rounding has lost.", WEIGHTS),
        "in_backward": Key(SWITCH, "Whether compiled backwards step each parameter as soon as its gradient is made."),
    },
}
"""The keys of each table."""

RULE_KEYS = {
    "id": Key(STRING, "A word that names the rule; a later file's rule of the same id takes its place."),
    "cast": Key(STRING, "What happens to the floating-point inputs.", tuple(map(str, Category))),
    "recipe": Key(STRING, "How cast = 'fp8', 'mxfp8' or 'nvfp4' scales.", tuple(map(str, Recipe))),
    "why": Key(STRING, "A sentence that is shown where the rule decides."),
    "ops": Key(STRINGS, "Op names: mm, aten::sum.dim_IntList, mylib::op, conv*.", parse=canonical),
    "modules": Key(STRINGS, "Globs on module paths: lm_head, layers.*.router.", parse=module_glob),
    "module_classes": Key(STRINGS, "Globs on class names: *RMSNorm.", parse=class_glob),
    "args": Key(
        ARGUMENTS,
        "Conditions on arguments by name: a value, or dtype, rank, size and shape of a tensor.",
        parse=ArgCondition.of,
    ),
    "reduces": Key(SIZE, "How many elements go into one result of a reduction: '>4096'.", parse=size_condition),
    "region": Key(
        STRING,
        "What it is for: ops of the forward, the backward, or both; what is kept between them; a loss; results.",
        RULE_REGIONS,
    ),
    "keep": Key(
        STRING,
        "How the forward keeps a value for the backward; in place of cast, with region = 'kept'.",
        tuple(map(str, Keep)),
    ),
    "block": Key(BLOCK, "How many elements share a scale in 8 bits."),
    "chunks": Key(
        COUNT_OR_AUTO,
        "How many rows of logits exist at a time, or 'auto'; in place of cast, for losses of linear layers.",
        parse=chunks_of,
    ),
    "drop": Key(SWITCH, "true: results beside a loss that meet the conditions are not made; in place of cast."),
    "gradients": Key(STRING, "Whether the forward or the backward makes a chunk's gradients.", GRADIENTS),
    "elements": Key(
        SIZE, "How many elements the kept value, the logits or the result have: '>=4096'.", parse=size_condition
    ),
    "read_by": Key(STRINGS, "Ops of which one at least reads the kept value in the forward.", parse=canonical),
    "torch": _VERSIONS_OF_TORCH,
    "inputs": Key(DTYPES_BY_NAME, "Dtypes of single arguments, others than cast gives."),
    "advice": Key(STRING, "What the error of a banned op tells the user."),
    "enabled": _ENABLED,
}
CONDITIONS = ("ops", "modules", "module_classes", "args", "reduces", "elements", "read_by")
"""A rule needs at least one of these keys."""
