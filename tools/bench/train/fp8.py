"""Contenders by torchao.float8, which swaps linear layers."""

import importlib.util
import warnings
from contextlib import AbstractContextManager, ExitStack

import torch
from torch import nn

from fxamp.backend.policy_in_force import resolve_here
from fxamp.capture.autocast_state import autocast_state
from fxamp.errors import OptionError, PolicyError
from fxamp.policy import Policy
from fxamp.tools.bench.train.experiment import Contender, Experiment


def require_fp8(name: str, experiment: Experiment) -> None:
    """Raise OptionError if the contender ``name`` cannot take part here, with what it needs."""
    if experiment.device == "cuda":
        policy = f"cuda-{experiment.lower_dtype}-{name.removeprefix('torchao-')}"  # needs the same units
        try:
            resolve_here(Policy.load(policy), torch.device("cuda"))
        except PolicyError as refused:
            raise OptionError(f"--contenders {name}: {refused}") from refused
    if importlib.util.find_spec("torchao") is None:
        raise OptionError(f"--contenders {name}: needs torchao, which is not installed: pip install torchao")


def convert_by_torchao(module: nn.Module, contender: Contender, device: str) -> nn.Module:
    """Swap the linear layers that fxamp's policy for the same recipe covers, in place; return ``module``."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear_utils import _auto_filter_for_recipe

    gains = _auto_filter_for_recipe(contender.fp8, filter_fqns=["lm_head"])

    def is_converted(layer: nn.Module, name: str) -> bool:
        if device == "cuda":
            return bool(gains(layer, name))
        return isinstance(layer, nn.Linear) and not any(size % 16 for size in layer.weight.shape) and "head" not in name

    config = Float8LinearConfig.from_recipe_name(contender.fp8)
    converted: nn.Module = convert_to_float8_training(module, config=config, module_filter_fn=is_converted)
    return converted


def autocast_for_torchao(device: str, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Autocast for ``device``, as torchao sees it: it asks for cuda's state on every device."""
    stack = ExitStack()
    stack.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", "torch.get_autocast_gpu_dtype", DeprecationWarning)  # torchao calls it
    stack.enter_context(torch.autocast(device, dtype))
    if device != "cuda":
        stack.enter_context(autocast_state("cuda", True, dtype))
    return stack
