"""What a machine or a version of torch may lack: a mark for each, which skips a test with that reason."""

import importlib.util

import pytest
import torch
from torch.nn import functional as F

from fxamp.errors import OptionError
from fxamp.policy.model.comparisons import holds
from fxamp.tools.bench.cost.hooks import compiler


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """A mark for tests that run on this many CUDA devices."""
    reason = "needs a CUDA device" if count == 1 else f"needs {count} CUDA devices"
    return pytest.mark.skipif(torch.cuda.device_count() < count, reason=reason)


needs_gpu = needs_gpus(1)
#: The marks of tests that run kernels on a GPU; torch warns as it imports Inductor.
ON_GPU = [
    pytest.mark.gpu,
    needs_gpu,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton's compiler")


def _has_compiler() -> bool:
    try:
        return bool(compiler())
    except OptionError:
        return False


#: Tests that bear the marker "inductor" or use the fixture "counting" get it.
needs_compiler = pytest.mark.skipif(not _has_compiler(), reason="needs a C++ compiler: install the package g++")


def _multiplies(dtype: torch.dtype, rows: tuple[int, ...] = ()) -> bool:
    one, scales = torch.ones(16, 16).to(dtype), torch.ones(rows)
    try:
        torch._scaled_mm(one, one.t(), scale_a=scales, scale_b=scales.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


#: On CPUs with AMX oneDNN multiplies what is in 8 bits, and knows no fnuz formats.
needs_fnuz_products = pytest.mark.skipif(
    not _multiplies(torch.float8_e4m3fnuz), reason="this CPU has no products in AMD's fnuz formats"
)

needs_rowwise_products = pytest.mark.skipif(
    not _multiplies(torch.float8_e4m3fn, (16, 1)), reason="this torch has no products with a scale for each row on CPUs"
)
#: torch 2.13 and newer.
needs_chunked_loss = pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="this torch has no chunked loss of its own"
)
needs_scaled_adagrad = pytest.mark.skipif(
    not hasattr(torch.optim.Adagrad([torch.zeros(1)], fused=True), "_step_supports_amp_scaling"),
    reason="Adagrad of this torch unscales no gradients",
)

#: The same CPUs: oneDNN prepares each product in 8 bits again, however small it is.
needs_quick_fp8_products = pytest.mark.skipif(
    not _multiplies(torch.float8_e4m3fnuz), reason="each product in 8 bits takes a tenth of a second on this CPU"
)

_BEFORE_2_12, _BEFORE_2_13 = (holds(condition, torch.__version__) for condition in ("<2.12", "<2.13"))

needs_writing_loops = pytest.mark.skipif(_BEFORE_2_13, reason="this torch refuses loops whose bodies write")
#: fxamp refuses such Functions there.
needs_writes_in_functions = pytest.mark.skipif(
    _BEFORE_2_12, reason="torch.compile of this torch loses the gradient of a Function that writes to its result"
)
needs_setters_of_autocast = pytest.mark.skipif(
    _BEFORE_2_12, reason="Dynamo of this torch does not trace torch.set_autocast_enabled"
)
needs_results_alone = pytest.mark.skipif(
    _BEFORE_2_12, reason="Dynamo of this torch makes values inside of a Function its results"
)
needs_gradients_of_one_tensor = pytest.mark.skipif(
    _BEFORE_2_13, reason="torch.compile of this torch loses a gradient of a Function that gets one tensor twice"
)
needs_gradient_hooks = pytest.mark.skipif(
    _BEFORE_2_13, reason="torch.compile of this torch misplaces a second hook, and one that reads inputs"
)
