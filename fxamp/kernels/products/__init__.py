"""Matrix products in 8 or 4 bits, by the recipes of :mod:`fxamp.policy`, as differentiable ops.

scaled_linear      a linear layer
scaled_experts     linear layers of experts, each for a group of rows: grouped_product, group_layout
quantize           matrices in 8 or 4 bits, and the product of two of them
float4, hadamard   values of 4 bits, and the transform that spreads their outliers
"""

from fxamp.kernels.products.scaled_experts import scaled_experts
from fxamp.kernels.products.scaled_linear import scaled_linear
