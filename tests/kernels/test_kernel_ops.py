"""The ops of compiled graphs: their contract, and that they survive every lowering, in backward graphs too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_cases import expected, random_gradients, same_bits
from support.checks.equality import assert_equal
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import GraphModule
from torch.library import opcheck

import fxamp.kernels  # noqa: F401  registers the ops
from fxamp.kernels.launch_plan import DTYPES

OPS = torch.ops.fxamp
INV_SCALE = torch.tensor(0.25)

# torch's own: Dynamo instantiates a Function while it traces it, and Inductor's import scripts a method.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]


def gradients() -> list[Tensor]:
    return [*random_gradients(5, DTYPES), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)]


def without_nan() -> list[Tensor]:
    """For opcheck, to which NaN differs from NaN."""
    return [gradient.masked_fill_(gradient.isnan(), float("inf")) for gradient in gradients()]


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_ops_keep_their_contract(dtype: torch.dtype | None) -> None:
    opcheck(OPS.check_unscale.default, (without_nan(), INV_SCALE, dtype))
    opcheck(OPS.check_unscale_norm.default, (without_nan(), INV_SCALE, dtype))


def test_no_gradients() -> None:
    true, flags, norm = OPS.check_unscale_norm([], INV_SCALE, torch.float32)
    assert (true, flags.shape, norm.item()) == ([], (0,), 0.0)


def test_dense_strides_are_kept() -> None:
    inputs = gradients()
    true, _ = OPS.check_unscale(inputs, INV_SCALE, torch.float32)
    assert true[-1].stride() == inputs[-1].stride()


def program(first: Tensor, second: Tensor, inv_scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (one, two), flags, norm = OPS.check_unscale_norm([first * 2, second.t() + 1], inv_scale, torch.float32)
    return one + 1, two * 2, flags.amax(), norm + 1


def assert_same_when_compiled(backend: str) -> None:
    first, second = torch.randn(5, 3, dtype=torch.float16), torch.randn(4, 7, dtype=torch.float64)
    compiled = torch.compile(program, backend=backend, fullgraph=True)
    for bad in (False, True):
        if bad:
            first[1, 2] = float("inf")
        expected, got = program(first, second, INV_SCALE), compiled(first, second, INV_SCALE)
        assert_equal(got, expected)
        assert expected[2].item() == int(bad)


@pytest.mark.usefixtures("implementation")
def test_in_a_graph_under_aot_eager() -> None:
    assert_same_when_compiled("aot_eager")


class ScaledIdentity(torch.autograd.Function):
    """Passes two tensors through; in the backward their gradients are unscaled and checked."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, two: Tensor, inv_scale: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(inv_scale)
        return one.clone(), two.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (inv_scale,) = ctx.saved_tensors
        (one, two), flags = OPS.check_unscale([grad.half() for grad in grads], inv_scale, torch.float32)
        return one + flags[0], two + flags[1], None


def assert_backward_works(backend: Any) -> None:
    def loss(one: Tensor, two: Tensor) -> Tensor:
        first, second = ScaledIdentity.apply(one * 1, two * 1, INV_SCALE)
        return (first * 8).sum() + (second * 1e6).sum()

    one, two = torch.randn(3, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    torch.compile(loss, backend=backend, fullgraph=True)(one, two).backward()
    assert one.grad is not None and one.grad.tolist() == [2.0] * 3
    assert two.grad is not None and two.grad.isinf().all()


@pytest.mark.usefixtures("implementation")
def test_in_a_backward_graph() -> None:
    backwards = []

    def keep(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        backwards.append(graph)
        return make_boxed_func(graph)

    assert_backward_works(aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph), bw_compiler=keep))
    (backward,) = backwards
    assert OPS.check_unscale.default in {node.target for node in backward.graph.nodes}


@pytest.mark.exhaustive
def test_in_graphs_under_inductor() -> None:
    assert_same_when_compiled("inductor")
    assert_backward_works("inductor")


def test_outputs_equal_torchs_op() -> None:
    reference = expected(gradients(), INV_SCALE, torch.float32)
    true, flags = OPS.check_unscale(gradients(), INV_SCALE, torch.float32)
    assert flags.tolist() == reference.flags
    assert all(map(same_bits, true[:-1], reference.true[:-1]))
