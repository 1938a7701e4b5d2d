"""MKL, which torch contains on x86: bfloat16 products with float32 results, for which torch has no op on a CPU."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_ROW_MAJOR, _NO_TRANSPOSE, _TRANSPOSE = 101, 111, 112  # CBLAS_LAYOUT and CBLAS_TRANSPOSE of MKL's mkl_cblas.h


def has_wide_products() -> bool:
    """Return whether :func:`write_wide_product` works: this torch contains MKL. If torch hides it, False: slower."""
    return _GEMM is not None


def write_wide_product(left: Tensor, right: Tensor, total: Tensor, add: bool) -> None:
    """Write ``left.T @ right`` to ``total``, or ``add`` it to what is there; all sums are in float32.

    Args:
        left: bfloat16 ``[M, N]`` on the CPU.
        right: bfloat16 ``[M, K]`` on the CPU.
        total: contiguous float32 ``[N, K]`` on the CPU.
        add: if False, ``total`` may be uninitialized.
    """
    gemm = _GEMM
    assert gemm is not None and left.dtype is right.dtype is torch.bfloat16 and total.dtype is torch.float32
    assert total.is_contiguous() and total.shape == (left.shape[1], right.shape[1]) and left.shape[0] == right.shape[0]
    if not add and not left.shape[0]:
        total.zero_()
    if left.numel() and right.numel():
        left, right = _rows(left), _rows(right)
        form = (_ROW_MAJOR, _TRANSPOSE, _NO_TRANSPOSE, *total.shape, left.shape[0])
        gemm(*form, 1.0, *_place(left), *_place(right), float(add), *_place(total))


def _rows(matrix: Tensor) -> Tensor:
    """``matrix``, copied unless it is stored row by row."""
    return matrix if matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1] else matrix.contiguous()


def _place(matrix: Tensor) -> tuple[int, int]:
    """The address and the leading dimension, at least a row's length: torch may give a single row any stride."""
    return matrix.data_ptr(), max(matrix.stride(0), matrix.shape[1])


def _loaded() -> Callable[..., None] | None:
    """``cblas_gemm_bf16bf16f32`` of MKL's reference, None where torch does not contain it."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    gemm: Any = getattr(ctypes.CDLL(str(path)), "cblas_gemm_bf16bf16f32", None) if path.exists() else None
    if gemm is not None:
        number, real, address = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
        gemm.argtypes = [number] * 6 + [real, address, number, address, number, real, address, number]
        gemm.restype = None
    return gemm  # type: ignore[no-any-return]


_GEMM = _loaded()
