"""How many warps run a generated step, and how many elements each lane handles at a time.

The sizes were chosen by counting machine code (``fxamp-bench kernels``). Programs of four warps fill a multiprocessor
better than those of eight. Eight elements per lane take two 16-byte accesses to a float32 tensor and one to a 16-bit
tensor, and share the loop's instructions; and one warp then handles the 256 elements that share a scale of 8-bit state.
No counted step spills registers.
"""

import torch

from fxamp.kernels.launch import OPTIONS

WARPS = 4
ELEMENTS_OF_A_LANE = 8
STEP_OPTIONS = {**OPTIONS, "num_warps": WARPS}
SCALARS_OPTIONS = {**OPTIONS, "num_warps": 1}


def step_block(wave: int | None = None) -> int:
    """Return how many elements a program of a step handles at a time.

    ``wave``: the lanes of a warp, 32 or 64; None for those of this build's GPUs.
    """
    return WARPS * (wave or (64 if torch.version.hip else 32)) * ELEMENTS_OF_A_LANE
