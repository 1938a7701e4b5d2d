"""Models that torchao.float8 converted, to compare with: on the CPU they compute as torchao does on a GPU."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from fxamp.capture.autocast_state import autocast_state

float8 = pytest.importorskip(
    "torchao.float8", reason="torchao is not installed, or not for this torch", exc_type=ImportError
)

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def converted(model: nn.Module, recipe: str, leave_out: tuple[str, ...] = ()) -> nn.Module:
    """A copy of ``model`` whose linear layers, but those of these names, are torchao's."""
    config = float8.Float8LinearConfig.from_recipe_name(recipe)

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
