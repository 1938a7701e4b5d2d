"""Gradients that DistributedDataParallel rounds to float16 on their way between ranks.

With a scaler in the options they are true when they come there, and would underflow. Which wrappers there are is known
from the graphs that run inside of them.
"""

from collections.abc import Iterable

import torch
from torch.nn.parallel import DistributedDataParallel

from fxamp.errors import UnscaledError
from fxamp.scaler.nested import REMEDY


def refuse_float16_buckets(wrappers: Iterable[DistributedDataParallel]) -> None:
    """Raise UnscaledError if one of ``wrappers`` sums gradients in float16.

    torch's own hooks are known by their names, which say "fp16"; what a user's own hook does nobody can tell.
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
