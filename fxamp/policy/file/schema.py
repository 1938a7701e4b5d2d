"""The keys of a policy file: of the file, of its tables, and of a rule, which its kinds declare.

The loader checks files with these tables, and :mod:`fxamp.policy.file.json_schema` writes them for editors.
"""

from fxamp.policy.model.cast_rule import CastRule
from fxamp.policy.model.chunk_rule import ChunkRule
from fxamp.policy.model.comparisons import version_condition
from fxamp.policy.model.drop_rule import DropRule
from fxamp.policy.model.keep_rule import KeepRule
from fxamp.policy.model.keys import COUNT, LIST, STRING, STRINGS, VERSIONS, Condition, Key, Kind, enum
from fxamp.policy.model.match import ARCHITECTURE, CPU_FEATURES, architecture, capability_condition, cpu_feature
from fxamp.policy.model.optimizer_table import ROUNDING, STATE, WEIGHTS
from fxamp.policy.model.rule import keys_of
from fxamp.policy.model.settings import ACCEPTED_VALUES

FEATURES = Kind("a list of strings", (list,), LIST | {"items": enum(CPU_FEATURES)}, items=(str,))
ARCHITECTURES = Kind(
    "a list of strings", (list,), LIST | {"items": {"type": "string", "pattern": f"^{ARCHITECTURE}$"}}, items=(str,)
)
SWITCH = Kind("true or false", (bool,), {"type": "boolean"})
NUMBER = Kind("a number", (int, float), {"type": "number"})
FORMS = Kind(
    "a string, or a table of strings",
    (str, dict),
    {"anyOf": [enum(STATE), {"type": "object", "additionalProperties": enum(STATE)}]},
    items=(str,),
)
TABLE = Kind("a table", (dict,))
TABLES_IN_LIST = Kind("a list of tables, each [[rule]]", (list,), items=(dict,))

FILE_KEYS = {
    "extends": Key(STRINGS, "Files that are read first, in this order; later ones win."),
    "match": Key(TABLE, "The machines that the policy is for."),
    "lower_precision_fp": Key(STRING, "The 16-bit dtype.", ACCEPTED_VALUES["lower_precision_fp"]),
    "unlisted": Key(STRING, "What happens to ops that no rule covers.", ACCEPTED_VALUES["unlisted"]),
    "outputs": Key(STRING, "The dtypes of a compiled graph's outputs.", ACCEPTED_VALUES["outputs"]),
    "loss_scale": Key(TABLE, "Arguments of fxamp.GradScaler."),
    "optimizer": Key(TABLE, "The precision of a compiled optimizer's state and weights, and when it steps."),
    "rule": Key(TABLES_IN_LIST, "The last rule whose conditions all hold decides a call."),
}

_ENABLED = Key(SWITCH, "false removes the inherited rule of this id, or switches the loss scale off.")

TABLES = {
    "match": {
        "device": Key(STRING, "The device that the policy is for.", ACCEPTED_VALUES["device"]),
        "capability": Key(
            VERSIONS, "Compute capability of an NVIDIA GPU, such as '>=8.0'.", parse=capability_condition
        ),
        "arch": Key(ARCHITECTURES, "Architectures of AMD GPUs, such as 'gfx950'.", parse=architecture),
        "cpu_features": Key(
            FEATURES,
            "Features that the CPU must have, as torch.cpu.get_capabilities() names them.",
            parse=cpu_feature,
        ),
        "torch": Key(VERSIONS, "Versions of torch: '>=2.12'.", parse=version_condition),
    },
    "loss_scale": {
        **dict.fromkeys(("init_scale", "growth_factor", "backoff_factor"), Key(NUMBER)),
        "growth_interval": Key(COUNT),
        **dict.fromkeys(("min_scale", "max_scale"), Key(NUMBER)),
        "enabled": _ENABLED,
    },
    "optimizer": {
        "state": Key(FORMS, "The form of the state: one for all, or by its name, with '*' for the others."),
        "rounding": Key(STRING, "How state and bfloat16 parameters are rounded when they are written.", ROUNDING),
        "weights": Key(STRING, "kahan stores the rounding error of each 16-bit parameter beside it.", WEIGHTS),
        "in_backward": Key(
            SWITCH, "Whether compiled backwards step each parameter as soon as its gradient is computed."
        ),
    },
}
"""The keys of each table."""

KINDS = (CastRule, KeepRule, ChunkRule, DropRule)
RULE_KEYS = {name: key for kind in KINDS for name, key in keys_of(kind).items()} | {"enabled": _ENABLED}
CONDITIONS = tuple(name for name, key in RULE_KEYS.items() if isinstance(key, Condition))
"""A rule needs at least one of these keys."""
