"""Bytes that are read and written: of eager ops by their schemas, of generated code by its text."""

import pytest
import torch
from torch import nn

from fxamp import kernels
from fxamp.tools.bench.traffic import counted_traffic, generated_traffic

CPP = """
kernel_0 = async_compile.cpp_pybinding(['const float*', 'const half*', 'float*', 'double*', 'const int64_t'], r'''
extern "C" void kernel(const float* in_ptr0, const at::Half* in_ptr1, float* out_ptr0, double* in_out_ptr0, \
const int64_t ks0)
{
}
''')
def call(self, args):
    %s
    buf0 = empty_strided_cpu((2, 5), (5, 1), torch.float32)
    buf1 = empty_strided_cpu((), (), torch.float64)
    kernel_0(a, reinterpret_tensor(b, (10, ), (1, ), 0), buf0, buf1, 3)
    buf2 = buf0; del buf0  # reuse
    kernel_0(c, b, buf2, buf1, 3)
"""
ONE_BY_ONE = (
    "assert_size_stride(a, (2, 5), (5, 1)); assert_size_stride(b, (10, ), (1, )); assert_size_stride(c, (), ())"
)
GROUPED = "assert_size_stride_grouped((a, b, c), ((2, 5), (10, ), ()), ((5, 1), (1, ), ()), 'input')"
TRITON = """
triton_poi_fused_0 = async_compile.triton('triton_poi_fused_0', '''
@triton_heuristics.pointwise(triton_meta={'signature': {'in_ptr0': '*bf16', 'out_ptr0': '*fp32', 'xnumel': 'i32'}})
@triton.jit
def triton_poi_fused_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    pass
''', device_str='cuda')
def call(self, args):
    assert_size_stride(a, (4, 4), (4, 1))
    buf0 = empty_strided_cuda((4, 4), (4, 1), torch.float32)
    triton_poi_fused_0.run(a, buf0, 16, stream=stream0)
"""


@pytest.mark.parametrize("checks", [ONE_BY_ONE, GROUPED])
def test_kernels_for_a_cpu(checks: str) -> None:
    """a, 40 bytes, once; b, 20, twice; buf0, 40, twice; what has one element not at all."""
    assert generated_traffic(CPP % checks) == (40 + 20 + 20, 40 + 40)


def test_kernels_for_a_gpu() -> None:
    assert generated_traffic(TRITON) == (32, 64)


def test_what_cannot_be_told_is_refused() -> None:
    with pytest.raises(ValueError, match="does not tell the size of a"):
        generated_traffic(CPP % "pass")
    with pytest.raises(ValueError, match="unknown type"):
        generated_traffic(TRITON.replace("*bf16", "*fp4"))


def test_eager_ops_by_their_schemas() -> None:
    """Read and written once each; views and copies' targets are not read, tensors of one element do not count."""
    x, y = torch.ones(8), torch.ones(8)
    with counted_traffic() as traffic:
        x.add_(y)  # reads two, writes one
        x.copy_(y)  # reads one, writes one
        x.view(2, 4)
        x.sum()  # reads one
    assert (traffic.read, traffic.written) == (4 * 32, 2 * 32)


def test_a_fused_step_writes_gradients_only_to_unscale_them() -> None:
    parameter = nn.Parameter(torch.ones(64))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    moved = []
    for scale in (None, None, torch.ones(())):
        parameter.grad = torch.ones(64)
        if scale is not None:
            optimizer.grad_scale, optimizer.found_inf = scale, torch.zeros(())  # type: ignore[attr-defined]
        with counted_traffic() as traffic:
            optimizer.step()
        moved.append((traffic.read / 64, traffic.written / 64))
    assert moved[1:] == [(16, 12), (16, 16)]


def test_fxamps_checks_count_as_planned() -> None:
    gradients = [torch.ones(6), torch.ones(10)]
    with counted_traffic() as traffic:
        kernels.check_(gradients, torch.zeros(()))
    assert (traffic.read, traffic.written) == (64, 0)
    with counted_traffic() as traffic:
        kernels.check_unscale_(gradients, torch.ones(()), torch.zeros(()))
    assert (traffic.read, traffic.written) == (64, 64)
