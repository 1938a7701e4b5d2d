"""How many warps run a generated step, and how many elements each lane handles at a time.

Chosen by counting machine code (``fxamp-bench kernels``). Programs of four warps fill a multiprocessor better
than those of eight. Eight elements of a lane are two accesses of 16 bytes to a float32 tensor, and the 256 elements
that share one scale of 8-bit state are one warp's. Where that needs so many registers that few warps fit, or that some
are spilled, a lane handles four.
"""

import torch
from torch.fx import GraphModule

from fxamp.kernels.launch import OPTIONS
from fxamp.kernels.small_floats import encode, round_by_chance

WARPS = 4
STEP_OPTIONS = {**OPTIONS, "num_warps": WARPS}
SCALARS_OPTIONS = {**OPTIONS, "num_warps": 1}

_MANY_DRAWS = 3


def step_block(gm: GraphModule, aligned: bool, wave: int | None = None) -> int:
    """Return how many elements a program of the step handles at a time.

    Args:
        gm: the step of one parameter.
        aligned: whether all addresses are multiples of 16 bytes; if not, each element's address holds registers.
        wave: the lanes of a warp, 32 or 64; by default those of this build's GPUs.
    """
    wave = wave or (64 if torch.version.hip else 32)
    return WARPS * wave * (8 if aligned and _draws(gm) < _MANY_DRAWS else 4)


def _draws(gm: GraphModule) -> int:
    """How often random bits are drawn for each element."""
    by_chance = [n for n in gm.graph.find_nodes(op="call_function", target=encode.default) if int(str(n.args[4])) >= 0]
    return len(by_chance) + len(gm.graph.find_nodes(op="call_function", target=round_by_chance.default))
