"""Sample calls of products, convolutions, recurrent cells, pointwise ops, reductions, norms and upsampling."""

from oracle.specs import Sample, call, integer
from oracle.specs import floating as f

_SQUARE = (f(3, 3),)
_BATCHED = (f(2, 3, 4), f(2, 4, 5))
_CELL_BIASES = {3: (f(9), f(9)), 4: (f(12), f(12)), 1: (f(3), f(3))}


def _convolution(dims: int) -> tuple:
    spatial = (5,) * dims
    return f(2, 3, *spatial), f(4, 3, *(3,) * dims), f(4)


def _transposed(dims: int) -> tuple:
    return f(2, 3, *(5,) * dims), f(3, 4, *(3,) * dims), f(4)


def _cell(gates: int) -> tuple:
    return f(2, 5), f(2, 3), f(3 * gates, 5), f(3 * gates, 3), *_CELL_BIASES[gates]


PRODUCTS = {
    "mm": call(f(2, 3), f(3, 4)),
    "bmm": call(*_BATCHED),
    "mv": call(f(2, 3), f(3)),
    "matmul": call(f(2, 3), f(3, 4)),
    "linear": call(f(2, 3), f(4, 3), f(4)),
    "addmm": call(f(2, 4), f(2, 3), f(3, 4)),
    "_addmm_activation": call(f(2, 4), f(2, 3), f(3, 4)),
    "addmv": call(f(2), f(2, 3), f(3)),
    "addr": call(f(2, 3), f(2), f(3)),
    "addbmm": call(f(3, 5), *_BATCHED),
    "baddbmm": call(f(2, 3, 5), *_BATCHED),
    "chain_matmul": call([f(2, 3), f(3, 4), f(4, 2)]),
    "linalg_multi_dot": call([f(2, 3), f(3, 4), f(4, 2)]),
    "linalg_vecdot": call(f(2, 3), f(2, 3)),
    "einsum": call("ij,jk->ik", [f(2, 3), f(3, 4)]),
    "scaled_dot_product_attention": call(f(1, 2, 3, 8), f(1, 2, 3, 8), f(1, 2, 3, 8)),
    "_scaled_dot_product_flash_attention": call(f(1, 2, 8, 8), f(1, 2, 8, 8), f(1, 2, 8, 8)),
    "_native_multi_head_attention": call(f(2, 3, 4), f(2, 3, 4), f(2, 3, 4), 4, 2, f(12, 4), f(12), f(4, 4), f(4)),
    "prelu": call(f(2, 3), f(3)),
    "dot": call(f(3), f(3)),
    "vdot": call(f(3), f(3)),
    "tensordot": call(f(2, 3), f(3, 4), [1], [0]),
    "bilinear": call(f(2, 3), f(2, 4), f(5, 3, 4), f(5)),
    "cross": call(f(2, 3), f(2, 3), 1),
}

CONVOLUTIONS = {
    **{f"conv{dims}d": call(*_convolution(dims)) for dims in (1, 2, 3)},
    **{f"conv{dims}d.padding": call(*_convolution(dims), padding="same") for dims in (1, 2, 3)},
    "conv_tbc": call(f(5, 2, 3), f(3, 3, 4), f(4)),
    "conv_transpose1d": call(*_transposed(1)),
    "conv_transpose2d.input": call(*_transposed(2)),
    "conv_transpose3d.input": call(*_transposed(3)),
    "convolution": call(*_convolution(2), [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "_convolution": call(*_convolution(2), [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, True, True),
    "_convolution.deprecated": call(*_convolution(2), [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, True),
    "cudnn_convolution": call(*_convolution(2)[:2], [0, 0], [1, 1], [1, 1], 1, False, False, True),
    "cudnn_convolution_transpose": call(*_transposed(2)[:2], [0, 0], [0, 0], [1, 1], [1, 1], 1, False, False, True),
    "_mps_convolution": call(*_convolution(2), [0, 0], [1, 1], [1, 1], 1),
}

RECURRENT = {
    "lstm_cell": call(f(2, 5), [f(2, 3), f(2, 3)], f(12, 5), f(12, 3), f(12), f(12)),
    "gru_cell": call(*_cell(3)),
    "rnn_tanh_cell": call(*_cell(1)),
    "rnn_relu_cell": call(*_cell(1)),
    "_thnn_fused_lstm_cell": call(f(2, 12), f(2, 12), f(2, 3), f(12), f(12)),
    "_thnn_fused_gru_cell": call(f(2, 9), f(2, 9), f(2, 3), f(9), f(9)),
    "_cudnn_rnn": call(
        f(4, 2, 5), [f(12, 5), f(12, 3), f(12), f(12)], 4, None, f(1, 2, 3), f(1, 2, 3), 2, 3, 0, 1, False, 0.0, True,
        False, [], None,
    ),
    "mkldnn_rnn_layer": call(
        f(4, 2, 5), f(12, 5), f(12, 3), f(12), f(12), f(2, 3), f(2, 3), False, [], 2, 3, 1, True, False, False, True
    ),
}  # fmt: skip

POINTWISE = {
    **{
        name: call(f(2, 3))
        for name in (
            "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "acos", "asin", "cosh", "sinh",
            "tan", "erfinv", "softplus",
        )
    },
    "pow.Tensor_Scalar": call(f(2, 3), 2.5),
    "pow.Tensor_Tensor": call(f(2, 3), f(2, 3)),
    "pow.Scalar": call(2.5, f(2, 3)),
    "addcdiv": call(f(2, 3), f(2, 3), f(2, 3)),
    "addcmul": call(f(2, 3), f(2, 3), f(2, 3)),
    "atan2": call(f(2, 3), f(2, 3)),
    "polar": call(f(2, 3), f(2, 3)),
    "fake_quantize_per_tensor_affine": call(f(2, 3), 0.1, 0, 0, 255),
    "view_as_complex": call(f(3, 2)),
}  # fmt: skip

REDUCTIONS = {
    "sum": call(f(2, 3)),
    "sum.dim_IntList": call(f(2, 3), [1]),
    "prod": call(f(2, 3)),
    "prod.dim_int": call(f(2, 3), 1),
    "cumsum": call(f(2, 3), 1),
    "cumprod": call(f(2, 3), 1),
    "softmax.int": call(f(2, 3), 1),
    "log_softmax.int": call(f(2, 3), 1),
    "logsumexp": call(f(2, 3), [1]),
    "norm.Scalar": call(f(2, 3)),
    "norm.ScalarOpt_dim": call(f(2, 3), 2, [1]),
    "linalg_vector_norm": call(f(2, 3)),
    "linalg_matrix_norm": call(f(2, 3), 2),
    "linalg_matrix_norm.str_ord": call(f(2, 3)),
    "frobenius_norm.dim": call(f(2, 3), [1]),
    "nuclear_norm": call(*_SQUARE),
    "nuclear_norm.dim": call(f(3, 3), [0, 1]),
    "dist": call(f(2, 3), f(2, 3)),
    "pdist": call(f(3, 2)),
    "cdist": call(f(3, 2), f(4, 2)),
    "renorm": call(f(2, 3), 2.0, 0, 1.0),
    "cosine_similarity": call(f(2, 3), f(2, 3)),
    "trace": call(*_SQUARE),
    "quantile": call(f(2, 3), f(2)),
    "quantile.scalar": call(f(2, 3), 0.5),
    "nanquantile": call(f(2, 3), f(2)),
    "nanquantile.scalar": call(f(2, 3), 0.5),
}

NORM_LAYERS = {
    "layer_norm": call(f(2, 3), [3], f(3), f(3)),
    "native_layer_norm": call(f(2, 3), [3], f(3), f(3), 1e-5),
    "rms_norm": call(f(2, 3), [3], f(3)),
    "group_norm": call(f(2, 4, 3), 2, f(4), f(4)),
    "batch_norm": call(f(2, 3, 4), f(3), f(3), f(3), f(3), True, 0.1, 1e-5, False),
}

_SPATIAL = {1: f(1, 2, 4), 2: f(1, 2, 4, 4), 3: f(1, 2, 4, 4, 4)}

UPSAMPLING = {
    **{f"upsample_nearest{d}d": call(_SPATIAL[d], [8] * d) for d in (1, 2, 3)},
    **{f"_upsample_nearest_exact{d}d": call(_SPATIAL[d], [8] * d) for d in (1, 2, 3)},
    "upsample_linear1d": call(_SPATIAL[1], [8], False),
    "upsample_bilinear2d": call(_SPATIAL[2], [8, 8], False),
    "upsample_trilinear3d": call(_SPATIAL[3], [8, 8, 8], False),
    "upsample_bicubic2d": call(_SPATIAL[2], [8, 8], False),
    "_upsample_bilinear2d_aa": call(_SPATIAL[2], [8, 8], False),
    "_upsample_bicubic2d_aa": call(_SPATIAL[2], [8, 8], False),
}

MOVES = {
    "cat": call([f(2, 3), f(2, 3)]),
    "stack": call([f(2, 3), f(2, 3)]),
    "index_copy": call(f(3, 2), 0, integer(2), f(2, 2)),
    "index_put": call(f(3, 2), [integer(2)], f(2, 2)),
    "scatter_add": call(f(3, 2), 0, integer(2, 2), f(2, 2)),
    "grid_sampler": call(f(1, 2, 4, 4), f(1, 3, 3, 2), 0, 0, False),
    "grid_sampler_2d": call(f(1, 2, 4, 4), f(1, 3, 3, 2), 0, 0, False),
    "_grid_sampler_2d_cpu_fallback": call(f(1, 2, 4, 4), f(1, 3, 3, 2), 0, 0, False),
    "grid_sampler_3d": call(f(1, 2, 4, 4, 4), f(1, 3, 3, 3, 3), 0, 0, False),
}

SAMPLES: dict[str, Sample] = {
    **PRODUCTS, **CONVOLUTIONS, **RECURRENT, **POINTWISE, **REDUCTIONS, **NORM_LAYERS, **UPSAMPLING, **MOVES
}  # fmt: skip
