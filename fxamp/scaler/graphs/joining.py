"""Detect DistributedDataParallel wrappers whose ranks may make different numbers of steps: torch's ``join()``.

A rank that has ended takes part in the wrapper's collective calls alone. It does not answer when the others agree on a
skip: they would take one of the wrapper's sums for an answer.
"""

from collections.abc import Iterable

from torch.nn.parallel import DistributedDataParallel

from fxamp.errors import UnscaledError


def refuse_joining(wrappers: Iterable[DistributedDataParallel]) -> None:
    """Raise UnscaledError if one of ``wrappers`` trains inside ``join()``."""
    for wrapper in wrappers:
        if getattr(wrapper._join_config, "enable", False):
            raise UnscaledError(
                "DistributedDataParallel's join() lets ranks end at different steps, but all ranks must agree on an "
                "overflow in each; accepted: the same number of steps on all ranks (DistributedSampler gives it), a "
                "bfloat16 policy, or a scaler left out of the options, as GradScaler(ranks=None), which then scales "
                "the loss as torch's does"
            )
