"""Work outside of the compiled graphs, counted by hand: the scaler's kernels and the optimizer's step.

Bytes are those of each tensor read or written once. Per byte of a parameter, its gradient included:

    torch, fused AdamW                7   reads p, g, m, v; writes p, m, v
    ... with the scaler, unclipped   +1   writes the unscaled gradient back
    torch, fused SGD with momentum    5   reads p, g, buffer; writes p, buffer
    torch's scaler                    2   checks (and unscales) in place: reads and writes the gradient
    clip_grad_norm_                   3   reads for the norm; reads and writes to multiply

fxamp's graphs return true, checked gradients, so neither of the scaler's lines applies: the check counts in the
backward. Without a scaler both have the same step. Launches are those of torch's multi-tensor kernels: of 320 chunks of
65536 elements, and of 36 tensors for AdamW, 55 for SGD, 110 for the others.
"""

from collections.abc import Callable, Sequence
from math import ceil

from torch import Tensor

from fxamp.tools.bench.cost.count import Access, Kernel
from fxamp.tools.bench.cost.workload import Way, Workload

#: Times that the fused step reads and writes a tensor as big as the parameter, and tensors a launch takes.
_OPTIMIZERS = {"AdamW": (4, 3, 36), "SGD": (3, 2, 55)}

_CHUNK, _CHUNKS, _PLAIN = 65536, 320, 110


def step_kernels(workload: Workload, way: Way, scaled: bool, parameters: Sequence[Tensor]) -> list[Kernel]:
    """The kernels of the step for gradients as big as the parameters."""
    if workload.optimizer not in _OPTIMIZERS:
        return []
    reads, writes, tensors = _OPTIMIZERS[workload.optimizer]
    once = sum(parameter.nbytes for parameter in parameters)
    launches = _launches(parameters)

    def kernel(ops: str, reads: int, writes: int, count: int) -> Kernel:
        sides = [
            (Access("gradients and state", once * times, "float32"),) if times else () for times in (reads, writes)
        ]
        return Kernel("step", "by hand", ops, sides[0], sides[1], launches=count)

    theirs = scaled and not way.policy
    kernels = []
    if theirs:
        kernels.append(kernel("scaler checks and unscales", 1, 1, launches(_PLAIN)))
    if workload.clip:
        kernels.append(kernel("norm of the gradients", 1, 0, launches(_PLAIN) + 3))
        kernels.append(kernel("gradients times the clip coefficient", 1, 1, launches(_PLAIN)))
    back = int(theirs and not workload.clip)
    kernels.append(kernel(f"fused {workload.optimizer}", reads, writes + back, launches(tensors)))
    if scaled:
        kernels.append(kernel("scaler's own scalars", 0, 0, 6))
    return kernels


def _launches(parameters: Sequence[Tensor]) -> Callable[[int], int]:
    chunks = sum(ceil(parameter.numel() / _CHUNK) for parameter in parameters) / _CHUNKS

    def launches(most: int) -> int:
        return max(1, ceil(max(chunks, len(parameters) / most)))

    return launches
