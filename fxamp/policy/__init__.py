"""Policies: which dtype each op of a program runs in, read from TOML files. Imports no torch."""

from fxamp.policy.builtin import built_in_names, variant_names
from fxamp.policy.category import Category
from fxamp.policy.loss_scale import LossScale
from fxamp.policy.model import Policy
from fxamp.policy.rule import Origin, Rule
from fxamp.policy.rulings import Ruling
from fxamp.policy.site import Site, Symbol, TensorFacts

__all__ = [
    "Category",
    "LossScale",
    "Origin",
    "Policy",
    "Rule",
    "Ruling",
    "Site",
    "Symbol",
    "TensorFacts",
    "built_in_names",
    "variant_names",
]
