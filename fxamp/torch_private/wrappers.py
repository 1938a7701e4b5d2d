"""Wrappers of modules: which one is running."""

from torch.nn.parallel import DistributedDataParallel


def running_wrapper() -> DistributedDataParallel | None:
    """Return the wrapper whose forward is running; torch stores it for its own compiler. Breaks loudly."""
    wrapper: DistributedDataParallel | None = DistributedDataParallel._active_ddp_module
    return wrapper
