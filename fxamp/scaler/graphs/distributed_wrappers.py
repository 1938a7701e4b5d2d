"""DistributedDataParallel and FSDP2 around compiled graphs: what they must not do to unscaled gradients.

1. They must not round gradients to float16 to send them between ranks, because without the scale they would underflow.
2. DistributedDataParallel's ranks must not make different numbers of steps, as inside torch's ``join()``. A rank that
   has ended takes part only in the wrapper's collective calls, not when the others agree on a skip: they would mistake
   one of the wrapper's sums for its answer.
"""

from collections.abc import Iterable

import torch
from torch.nn.parallel import DistributedDataParallel

from fxamp.errors import UnscaledError
from fxamp.optim.reading.layout import optimized_parameters
from fxamp.scaler.outside_graphs.nested import REMEDY
from fxamp.torch_private import summed_in


def require_unscaled_sums(wrappers: Iterable[DistributedDataParallel]) -> None:
    """Raise UnscaledError if one of ``wrappers`` sums gradients in float16 (1), or trains inside ``join()`` (2).

    torch's own hooks are recognised by "fp16" in their names. A user's own hook cannot be checked.
    """
    for wrapper in wrappers:
        hook = str(wrapper._get_ddp_logging_data().get("comm_hook", ""))  # type: ignore[no-untyped-call]
        precision = wrapper.mixed_precision
        narrow = precision is not None and torch.float16 in (precision.param_dtype, precision.reduce_dtype)
        if "fp16" in hook.lower() or narrow:
            what = "mixed_precision" if narrow else f"communication hook {hook}"
            raise UnscaledError(
                f"DistributedDataParallel's {what} rounds gradients to float16, which underflow without the scale; "
                f"accepted with a scaler in the options: no such hook, or bf16_compress_hook. {REMEDY}"
            )
        if getattr(wrapper._join_config, "enable", False):
            raise UnscaledError(
                "DistributedDataParallel's join() lets ranks end at different steps, but all ranks must agree on an "
                "overflow in each; accepted: the same number of steps on all ranks (DistributedSampler gives it), a "
                "bfloat16 policy, or a scaler left out of the options, as GradScaler(ranks=None), which then scales "
                "the loss as torch's does"
            )


def require_unscaled_shards(optimizer: torch.optim.Optimizer) -> None:
    """Raise UnscaledError if FSDP2 sums gradients of the optimizer's parameters in float16 (1)."""
    narrow = {id(parameter) for parameter in summed_in(torch.float16)}
    if narrow and any(id(parameter) in narrow for parameter in optimized_parameters(optimizer)):
        raise UnscaledError(
            "FSDP2's MixedPrecisionPolicy(reduce_dtype=torch.float16) rounds gradients to float16, which underflow "
            f"without the scale; accepted with a scaler in the options: reduce_dtype float32 or bfloat16. {REMEDY}"
        )
