"""What a policy file may say: its keys, their kinds, and the values they take, as tables."""

from fxamp.policy.category import Category
from fxamp.policy.model import ACCEPTED_VALUES

STRING, STRINGS, TABLE, TABLES = "a string", "a list of strings", "a table", "a list of tables, each [[rule]]"

FILE_KEYS = {
    "extends": STRINGS,
    "match": TABLE,
    "lower_precision_fp": STRING,
    "outputs": STRING,
    "placement": STRING,
    "rule": TABLES,
}
MATCH_KEYS = {"device": STRING}
RULE_KEYS = {"id": STRING, "cast": STRING, "ops": STRINGS, "why": STRING, "torch": STRING, "advice": STRING}
RULE_NEEDS = ("id", "cast", "ops")

CHOICES = {**ACCEPTED_VALUES, "cast": tuple(category.value for category in Category)}
"""Keys whose value is one of a few words."""


def is_of_kind(value: object, kind: str) -> bool:
    """Say whether a parsed TOML value is of a kind of this module."""
    if kind is STRING:
        return isinstance(value, str)
    if kind is TABLE:
        return isinstance(value, dict)
    item = str if kind is STRINGS else dict
    return isinstance(value, list) and all(isinstance(each, item) for each in value)
