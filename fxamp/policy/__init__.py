"""Policies: the dtype in which each op of a program runs, read from TOML files. Imports no torch."""

from fxamp.policy.file.shipped import built_in_names, variant_names
from fxamp.policy.model.cast_rule import CastRule
from fxamp.policy.model.category import Category
from fxamp.policy.model.chunk_rule import ChunkRule
from fxamp.policy.model.drop_rule import DropRule
from fxamp.policy.model.keep_rule import KeepRule
from fxamp.policy.model.loss_scale import LossScale
from fxamp.policy.model.optimizer_table import OptimizerPrecision
from fxamp.policy.model.recipe import MULTIPLE, PACKED, RECIPES, ROW, TENSOR, Products, Quantization, Recipe
from fxamp.policy.model.rule import Origin, Rule
from fxamp.policy.model.rulings import Ruling
from fxamp.policy.model.site import Site, Symbol, TensorFacts
from fxamp.policy.policy import Policy
