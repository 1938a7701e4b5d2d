"""Wrappers of modules: which one is running, and what FSDP2 sums in which dtype."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed._composable_state import _module_state_mapping
from torch.nn.parallel import DistributedDataParallel


def running_wrapper() -> DistributedDataParallel | None:
    """Return the wrapper whose forward is running; torch stores it for its own compiler. Breaks loudly."""
    wrapper: DistributedDataParallel | None = DistributedDataParallel._active_ddp_module
    return wrapper


def summed_in(dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the parameters whose gradients FSDP2 casts to ``dtype`` to sum them between ranks.

    If torch renames its attributes, none is found.
    """
    for state in [reference() for reference in _module_state_mapping.values()]:
        if getattr(getattr(state, "_mp_policy", None), "reduce_dtype", None) is dtype:
            groups = getattr(state, "_fsdp_param_groups", None)  # before torch 2.13 there is one group
            for group in [getattr(state, "_fsdp_param_group", None)] if groups is None else groups:
                for parameter in getattr(group, "fsdp_params", ()):
                    yield parameter.sharded_param
