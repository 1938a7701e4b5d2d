"""What cannot be seen without the device, and what fxamp does otherwise on purpose: each with its reason."""

from torch._ops import OpOverload

from oracle.dtypes import Dtypes
from oracle.specs import Sample

UNSEEN = {
    "aten::_cudnn_rnn": "its autocast kernel lays the weights out anew through cuDNN, which needs a driver",
}
"""Ops whose autocast kernel cannot run here; only the category in the table is checked."""


def names_dimensions(name: str) -> bool:
    """Say whether an overload takes dimension names (torch < 2.13): there are no fake tensors with names."""
    return name.rpartition(".")[2] in (
        "Dimname", "dimname", "dim_Dimname", "dim_DimnameList", "names_ScalarOpt_dim"
    )  # fmt: skip


NO_FAKE_KERNEL = {
    "aten::_convolution": "asks the driver for the memory format (CUDA builds)",
    "aten::_convolution.deprecated": "asks the driver for the memory format (CUDA builds)",
    "aten::_grid_sampler_2d_cpu_fallback": "has no fake kernel",
    "aten::_mps_convolution": "has no fake kernel",
    "aten::_scaled_dot_product_flash_attention": "has no fake kernel for this device",
    "aten::_thnn_fused_gru_cell": "has no fake kernel",
    "aten::batch_norm": "asks for the device's own backend",
    "aten::convolution": "asks the driver for the memory format (CUDA builds)",
    "aten::ctc_loss.IntList": "its output's shape depends on values",
    "aten::ctc_loss.Tensor": "its output's shape depends on values",
    "aten::cudnn_convolution": "has no fake kernel",
    "aten::cudnn_convolution_transpose": "has no fake kernel",
    "aten::grid_sampler": "asks for the device's own backend",
    "aten::gru_cell": "calls _thnn_fused_gru_cell, which has no fake kernel",
    "aten::linalg_lstsq": "its output's shape depends on values",
    "aten::nanquantile": "looks at its argument's values (torch 2.11)",
    "aten::nanquantile.scalar": "looks at its argument's values (torch 2.11)",
    "aten::quantile": "looks at its argument's values (torch 2.11)",
    "aten::quantile.scalar": "looks at its argument's values (torch 2.11)",
    "aten::scaled_dot_product_attention": "asks for the device's own backend",
}
"""Ops that do not run on FakeTensors of some device here: the dtypes that reach them are checked, their outputs not."""


UNTRACED = {
    "aten::matmul.out": "asks for the device's own backend while it is traced (torch built without the device)",
}
"""Calls that run on FakeTensors of an absent device, but cannot be captured from them."""


def really_refused(op: OpOverload, sample: Sample, dtypes: Dtypes) -> bool:
    """Say whether a real CPU kernel refuses these dtypes; fake kernels accept mixtures that no real one does."""
    args, kwargs = sample.build(dtypes, "cpu")
    try:
        op(*args, **kwargs)
    except (RuntimeError, NotImplementedError):
        return True
    return False
