"""Policies: which dtype each op of a program runs in, read from TOML files. Imports no torch."""

from fxamp.policy.builtin import built_in_names
from fxamp.policy.category import Category
from fxamp.policy.model import Origin, Policy, Rule, Ruling

__all__ = ["Category", "Origin", "Policy", "Rule", "Ruling", "built_in_names"]
