"""Sample calls of losses, pooling, padding, Fourier transforms and linear algebra."""

from oracle.specs import Sample, call, int32, integer
from oracle.specs import floating as f

_PAIR = (f(2, 3), f(2, 3))

LOSSES = {
    **{
        name: call(*_PAIR)
        for name in (
            "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "soft_margin_loss", "hinge_embedding_loss",
            "binary_cross_entropy", "binary_cross_entropy_with_logits",
        )
    },
    "poisson_nll_loss": call(*_PAIR, True, False, 1e-8, 1),
    "nll_loss": call(f(2, 3), integer(2), f(3)),
    "nll_loss2d": call(f(1, 3, 2, 2), integer(1, 2, 2), f(3)),
    "cross_entropy_loss": call(f(2, 3), integer(2), f(3)),
    "margin_ranking_loss": call(f(3), f(3), f(3)),
    "multi_margin_loss": call(f(2, 3), integer(2)),
    "multilabel_margin_loss": call(f(2, 3), integer(2, 3)),
    "multilabel_margin_loss_forward": call(f(2, 3), integer(2, 3), 1),
    "cosine_embedding_loss": call(*_PAIR, f(2)),
    "triplet_margin_loss": call(*_PAIR, f(2, 3)),
    "ctc_loss.IntList": call(f(4, 2, 3), integer(2, 2), [4, 4], [2, 2]),
    "ctc_loss.Tensor": call(f(4, 2, 3), integer(2, 2), integer(2), integer(2)),
}  # fmt: skip

_VOLUME = f(1, 2, 4, 4, 4)

POOLING = {
    "avg_pool3d": call(_VOLUME, [2, 2, 2]),
    "max_pool3d": call(_VOLUME, [2, 2, 2]),
    "adaptive_avg_pool3d": call(_VOLUME, [2, 2, 2]),
    "adaptive_max_pool3d": call(_VOLUME, [2, 2, 2]),
    "fractional_max_pool2d": call(f(1, 2, 4, 4), [2, 2], [2, 2], f(1, 2, 2)),
    "fractional_max_pool3d": call(_VOLUME, [2, 2, 2], [2, 2, 2], f(1, 2, 3)),
    "max_unpool2d": call(f(1, 2, 2, 2), integer(1, 2, 2, 2), [4, 4]),
    "max_unpool3d": call(f(1, 2, 2, 2, 2), integer(1, 2, 2, 2, 2), [4, 4, 4], [2, 2, 2], [0, 0, 0]),
    "reflection_pad1d": call(f(1, 2, 4), [1, 1]),
    "reflection_pad2d": call(f(1, 2, 4, 4), [1, 1, 1, 1]),
    "replication_pad1d": call(f(1, 2, 4), [1, 1]),
    "replication_pad2d": call(f(1, 2, 4, 4), [1, 1, 1, 1]),
    "replication_pad3d": call(_VOLUME, [1, 1, 1, 1, 1, 1]),
}

FOURIER = {
    **{f"fft_{name}": call(f(4, 4)) for name in ("fft", "fft2", "fftn", "ifft", "ifft2", "ifftn")},
    **{
        f"fft_{name}": call(f(4, 4))
        for name in ("rfft", "rfft2", "rfftn", "irfft", "irfft2", "irfftn", "hfft", "ihfft")
    },
    "stft": call(f(2, 8), 4, None, None, f(4), False, None, True),
    "stft.center": call(f(2, 8), 4, None, None, f(4), True, "constant", False, None, True),
}

_MATRIX = f(3, 3)

LINEAR_ALGEBRA = {
    **{
        name: call(_MATRIX)
        for name in (
            "cholesky", "cholesky_inverse", "inverse", "pinverse", "geqrf", "_lu_with_info", "qr", "svd", "linalg_cond",
            "linalg_cholesky", "linalg_cholesky_ex", "linalg_svd", "linalg_svdvals", "linalg_eig", "linalg_eigh",
            "linalg_eigvals", "linalg_eigvalsh", "linalg_inv", "linalg_inv_ex", "linalg_qr", "linalg_matrix_sqrth",
        )
    },
    "linalg_cond.p_str": call(_MATRIX, "fro"),
    "linalg_matrix_rank": call(_MATRIX, 0.1),
    "linalg_matrix_rank.tol_tensor": call(_MATRIX, f()),
    "linalg_matrix_rank.atol_rtol_float": call(_MATRIX, atol=0.1),
    "linalg_matrix_rank.atol_rtol_tensor": call(_MATRIX, atol=f()),
    "cholesky_solve": call(f(3, 2), _MATRIX),
    "triangular_solve": call(f(3, 2), _MATRIX),
    "lu_solve": call(f(3, 2), _MATRIX, int32(3)),
    "linalg_solve": call(_MATRIX, f(3, 2)),
    "linalg_lstsq": call(_MATRIX, f(3, 2)),
    "orgqr": call(_MATRIX, f(2)),
    "ormqr": call(_MATRIX, f(3), f(3, 2)),
    "linalg_householder_product": call(_MATRIX, f(2)),
    "linalg_tensorinv": call(f(4, 2, 2), 1),
    "linalg_tensorsolve": call(f(2, 2, 4), f(2, 2)),
}  # fmt: skip

SAMPLES: dict[str, Sample] = {**LOSSES, **POOLING, **FOURIER, **LINEAR_ALGEBRA}
