"""What a machine or a version of torch may lack: a mark for each, which skips a test with that reason."""

import importlib.util

import pytest
import torch
from torch.nn import functional as F

from fxamp.errors import OptionError
from fxamp.tools.bench.cost.hooks import compiler


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """A mark for tests that run on so many CUDA devices."""
    reason = "needs a CUDA device" if count == 1 else f"needs {count} CUDA devices"
    return pytest.mark.skipif(torch.cuda.device_count() < count, reason=reason)


needs_gpu = needs_gpus(1)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton's compiler")


def _has_compiler() -> bool:
    try:
        return bool(compiler())
    except OptionError:
        return False


#: Tests that bear the marker "inductor" or use the fixture "counting" get it.
needs_compiler = pytest.mark.skipif(not _has_compiler(), reason="needs a C++ compiler: install the package g++")


def _multiplies(dtype: torch.dtype) -> bool:
    one = torch.ones(16, 16).to(dtype)
    try:
        torch._scaled_mm(one, one.t(), scale_a=torch.ones(()), scale_b=torch.ones(()), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


#: On CPUs with AMX oneDNN multiplies what is in 8 bits, and knows no fnuz formats.
needs_fnuz_products = pytest.mark.skipif(
    not _multiplies(torch.float8_e4m3fnuz), reason="this CPU has no products in AMD's fnuz formats"
)

#: torch 2.12 and newer.
needs_chunked_loss = pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="this torch has no chunked loss of its own"
)
