"""Detect DistributedDataParallel wrappers that round gradients to float16 for communication between ranks.

With a scaler in the options, gradients are unscaled at that point and would underflow in float16. fxamp finds the
wrappers through the compiled graphs that run inside them.
"""

from collections.abc import Iterable

import torch
from torch.nn.parallel import DistributedDataParallel

from fxamp.errors import UnscaledError
from fxamp.scaler.outside_graphs.nested import REMEDY


def refuse_float16_buckets(wrappers: Iterable[DistributedDataParallel]) -> None:
    """Raise UnscaledError if one of ``wrappers`` sums gradients in float16.

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
