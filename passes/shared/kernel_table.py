"""Facts about ATen kernels that neither schemas nor fake kernels provide, found by running every op of torch's op
database with 16-bit and with mixed inputs (torch 2.13, CPU). The tests check a sample of each table again.

Names have no overload; an in-place variant counts as its functional op.
"""

from fxamp.policy.model.op_names import aten_ops

#: Pointwise ops that reject inputs of different floating-point dtypes.
UNPROMOTED_POINTWISE = aten_ops("complex heaviside isclose lerp polar prelu _prelu_kernel")

#: Ops, not tagged pointwise, that promote their inputs themselves, convert to the dtype they write, or treat each of a
#: list of tensors by itself.
PROMOTES = aten_ops("""
    _to_copy addr as_strided_scatter atleast_1d atleast_2d atleast_3d binary_cross_entropy_with_logits block_diag
    broadcast_tensors bucketize cat column_stack concat concatenate copy cosine_embedding_loss cosine_similarity cov
    cumulative_trapezoid diagonal_scatter dist dstack equal expand_as float_power gaussian_nll_loss hinge_embedding_loss
    hstack huber_loss index_fill isin kl_div kron l1_loss margin_ranking_loss masked_fill max min mse_loss normal outer
    pairwise_distance poisson_nll_loss reshape_as resize_as rms_norm searchsorted select_scatter slice_scatter
    smooth_l1_loss soft_margin_loss stack to trapezoid trapz triplet_margin_loss type_as view_as vstack where
""")

#: Norms that take a 16-bit input with float32 parameters and statistics (not the other way round).
TAKES_FLOAT32_PARAMETERS = aten_ops("""
    _batch_norm_with_update _native_batch_norm_legit batch_norm cudnn_batch_norm group_norm instance_norm layer_norm
    native_batch_norm native_group_norm native_layer_norm
""")

#: Ops whose fake kernels accept no floating dtype but bfloat16.
TAKES_BFLOAT16 = frozenset({"aten::_grouped_mm"})

_LINALG = """
    cholesky cholesky_inverse cholesky_solve geqrf inverse logdet lu_solve matrix_exp nuclear_norm orgqr ormqr pinverse
    qr slogdet svd triangular_solve det linalg_cholesky linalg_cholesky_ex linalg_cond linalg_det linalg_eig linalg_eigh
    linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_ldl_factor
    linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve
    linalg_matrix_exp linalg_matrix_rank linalg_pinv linalg_qr linalg_slogdet linalg_solve
    linalg_solve_ex linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve _linalg_det
    _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd _lu_with_info
"""
_FFT = """
    _fft_c2c _fft_r2c fft_fft fft_fft2 fft_fftn fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ihfft
    fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn istft stft
"""
_SPECIAL = """
    special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
    special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
    special_chebyshev_polynomial_w special_erfcx special_hermite_polynomial_h special_hermite_polynomial_he
    special_laguerre_polynomial_l special_legendre_polynomial_p special_log_ndtr special_modified_bessel_i0
    special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri
    special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t
    special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
    special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 special_zeta
"""
_BACKWARD = "special_i1 special_i1e"

#: Ops without a 16-bit kernel on any device, or whose backward has none.
LACKS_HALF_KERNEL = aten_ops(_LINALG + _SPECIAL + _BACKWARD)

#: Ops with 16-bit kernels for some calls only: Fourier transforms on GPUs for powers of two, some matrix norms.
HAS_HALF_KERNEL_FOR_SOME_SIZES = aten_ops(_FFT + "linalg_matrix_norm")

_CPU = """
    _cdist_forward _ctc_loss _histogramdd_bin_edges _histogramdd_from_bin_cts _pdist_forward _upsample_bilinear2d_aa
    avg_pool3d cdist complex ctc_loss histc histogram histogramdd multi_margin_loss multilabel_margin_loss
    multilabel_margin_loss_forward pdist polar rrelu_with_noise view_as_complex
"""

#: Ops that lack a 16-bit kernel only on the CPU.
LACKS_HALF_KERNEL_ON_CPU = aten_ops(_CPU + _FFT)
