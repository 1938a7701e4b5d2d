"""Models that torchao.float8 converted, to compare with: on the CPU they compute as torchao does on a GPU."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import nn

from fxamp.capture.autocast_state import autocast_state
from support.machines.lacks import needs_fnuz_products, needs_rowwise_products

float8 = pytest.importorskip(
    "torchao.float8", reason="torchao is not installed, or not for this torch", exc_type=ImportError
)

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
FNUZ = tuple(f"{recipe}_fnuz" for recipe in RECIPES)
"""The same in the formats in which torchao computes on an MI300X."""


def multiplied(*recipes: str) -> list[Any]:
    """``recipes`` as parameters of tests that multiply."""
    rowwise = {True: [needs_rowwise_products], False: []}
    fnuz = {True: [needs_fnuz_products], False: []}
    return [pytest.param(name, marks=rowwise["rowwise" in name] + fnuz[name in FNUZ]) for name in recipes]


MULTIPLIED = multiplied(*RECIPES, *FNUZ)


_IN_FNUZ = {torch.float8_e4m3fn: torch.float8_e4m3fnuz, torch.float8_e5m2: torch.float8_e5m2fnuz}


def converted(model: nn.Module, recipe: str, leave_out: tuple[str, ...] = ()) -> nn.Module:
    """A copy of ``model`` whose linear layers, but those of these names, are torchao's."""
    config = float8.Float8LinearConfig.from_recipe_name(recipe.removesuffix("_fnuz"))
    if recipe in FNUZ:
        casts = {key.name: getattr(config, key.name) for key in fields(config) if key.name.startswith("cast_config")}
        in_fnuz = {name: replace(cast, target_dtype=_IN_FNUZ[cast.target_dtype]) for name, cast in casts.items()}
        config = replace(config, **in_fnuz)

    def is_converted(module: nn.Module, name: str) -> bool:
        return name not in leave_out

    swapped: nn.Module = float8.convert_to_float8_training(
        copy.deepcopy(model), config=config, module_filter_fn=is_converted
    )
    return swapped


@contextmanager
def autocast(dtype: torch.dtype) -> Iterator[None]:
    """Autocast on the CPU, and what torchao reads to know that there is one: cuda's."""
    with torch.autocast("cpu", dtype), autocast_state("cuda", True, dtype), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.get_autocast_gpu_dtype", DeprecationWarning)  # torchao calls it
        yield
