"""The keys of a policy file, the kinds of their values, and the accepted values, as tables."""

from fxamp.policy.model.category import Category
from fxamp.policy.model.chunks import GRADIENTS
from fxamp.policy.model.conditions import CHECKS
from fxamp.policy.model.keep import Keep
from fxamp.policy.model.recipe import Recipe
from fxamp.policy.model.rule import RULE_REGIONS
from fxamp.policy.model.settings import ACCEPTED_VALUES

STRING, STRINGS, TABLE, LIST = "a string", "a list of strings", "a table", "a list of tables, each [[rule]]"
SWITCH, NUMBER, COUNT, SIZE = "true or false", "a number", "a whole number", "a whole number, or a string such as '>64'"
COUNT_OR_WORD = "a whole number, or a string"
ANY = "a value, or a table of conditions"
WORD_OR_TABLE = "a string, or a table of strings"

FILE_KEYS = {
    "extends": STRINGS,
    "match": TABLE,
    "lower_precision_fp": STRING,
    "unlisted": STRING,
    "outputs": STRING,
    "loss_scale": TABLE,
    "optimizer": TABLE,
    "rule": LIST,
}
TABLES = {
    "match": {"device": STRING, "capability": STRING, "arch": STRINGS, "cpu_features": STRINGS, "torch": STRING},
    "loss_scale": {
        "init_scale": NUMBER,
        "growth_factor": NUMBER,
        "backoff_factor": NUMBER,
        "growth_interval": COUNT,
        "min_scale": NUMBER,
        "max_scale": NUMBER,
        "enabled": SWITCH,
    },
    "optimizer": {"state": WORD_OR_TABLE, "rounding": STRING, "weights": STRING},
}
"""The keys of each table."""

RULE_KEYS = {
    "id": STRING,
    "cast": STRING,
    "recipe": STRING,
    "why": STRING,
    "ops": STRINGS,
    "modules": STRINGS,
    "module_classes": STRINGS,
    "args": TABLE,
    "reduces": SIZE,
    "region": STRING,
    "keep": STRING,
    "block": COUNT,
    "chunks": COUNT_OR_WORD,
    "gradients": STRING,
    "elements": SIZE,
    "read_by": STRINGS,
    "torch": STRING,
    "inputs": TABLE,
    "advice": STRING,
    "enabled": SWITCH,
}
CONDITIONS = ("ops", "modules", "module_classes", "args", "reduces", "elements", "read_by")
"""A rule needs at least one of these keys."""

ARG_KEYS = tuple(CHECKS)
"""The keys of a condition on an argument that is written as a table."""

CHOICES = {
    **ACCEPTED_VALUES,
    "cast": tuple(category.value for category in Category),
    "gradients": GRADIENTS,
    "keep": tuple(keep.value for keep in Keep),
    "recipe": tuple(recipe.value for recipe in Recipe),
    "region": RULE_REGIONS,
}
"""Keys with a fixed set of accepted values."""


def is_of_kind(value: object, kind: str) -> bool:
    """Return whether a parsed TOML value is of ``kind``, one of this module's constants."""
    if kind == ANY:
        return True
    if kind in _TYPES:
        return isinstance(value, _TYPES[kind]) and (kind == SWITCH or not isinstance(value, bool))
    if kind == WORD_OR_TABLE:
        return isinstance(value, str) or (isinstance(value, dict) and all(isinstance(v, str) for v in value.values()))
    item = str if kind == STRINGS else dict
    return isinstance(value, list) and all(isinstance(entry, item) for entry in value)


_TYPES: dict[str, type | tuple[type, ...]] = {
    STRING: str,
    TABLE: dict,
    SWITCH: bool,
    NUMBER: (int, float),
    COUNT: int,
    SIZE: (int, str),
    COUNT_OR_WORD: (int, str),
}
