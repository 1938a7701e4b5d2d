"""What leaves a compiled graph: dtypes never narrower than autocast's, and tensors that are one stay one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from support.checks.exhaustive import each_once, exhaustive
from support.oracles.like_autocast import assert_like_autocast, compile_with, leaf
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxamp

#: torch 2.11 and 2.12 warn where a program makes a class.
pytestmark = pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning")

LOWERINGS = ("eager", "aot_eager")


#: Programs of a 16-bit input; cpu's autocast gives float32 for the first ones, 16 bits for the others.
OF_16_BITS: dict[str, Callable[[Tensor], Tensor]] = {
    "prod": lambda x: x.prod(),
    "loss": lambda x: F.mse_loss(x, x.relu()),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long)),
    "inverse": lambda x: torch.linalg.inv(x.float() + 9 * torch.eye(4)),
    "product": lambda x: x @ x,
    "own cast": lambda x: (x @ x).half(),
    "sum": lambda x: x.sum(),
}


@each_once("name, dtype, lowering", OF_16_BITS, [torch.float16, torch.bfloat16], LOWERINGS)
def test_a_result_is_never_narrower_than_autocasts(name: str, dtype: torch.dtype, lowering: str) -> None:
    x = leaf(4, 4).detach().to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        want = OF_16_BITS[name](x)
    got = compile_with(OF_16_BITS[name], lowering)(x)
    assert got.dtype in (want.dtype, torch.float32)
    assert_equal(got, want, check_dtype=False)


def test_a_product_of_the_other_16_bits_keeps_its_range() -> None:
    x = torch.full((8, 8), 100.0).half()
    assert compile_with(lambda x: x @ x)(x).max() == 79872


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_16_bit_model_meets_its_own_dtype_behind_a_break(lowering: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = F.softplus(self.first(x)).prod(0, keepdim=True)
            torch._dynamo.graph_break()
            return self.second(hidden)

    model = Net().bfloat16()
    x = leaf(4, 4).detach().bfloat16()
    assert torch.isfinite(compile_with(model, lowering)(x)).all()


def written_twice(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    return h.add_(1), h


def view_of_a_write(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    h[0].mul_(2)
    return h, h[0], h.t()


def same_pick_twice(x: Tensor, w: Tensor) -> Any:
    parts = (x @ w).split(2)
    return parts[0], parts[0], parts[1]


def input_and_its_view(x: Tensor, w: Tensor) -> Any:
    return x[1:], x @ w


def checkpoint_and_its_input(x: Tensor, w: Tensor) -> Any:
    h = x @ x
    return checkpoint(lambda a: a @ w, h, use_reentrant=False), h


def hidden_states(x: Tensor, w: Tensor) -> Any:
    states = [x @ w]
    for _ in range(2):
        states.append(checkpoint(lambda a: F.gelu(a @ a), states[-1], use_reentrant=False))
    return states


def checkpoint_that_returns_its_input(x: Tensor, w: Tensor) -> Any:
    h = x @ x
    result, same = checkpoint(lambda a: (a @ w, a), h, use_reentrant=False)
    return result, same, h


def checkpoint_written_to(x: Tensor, w: Tensor) -> Any:
    h = checkpoint(lambda a: F.gelu(a @ w) @ w, x, use_reentrant=False)
    F.relu(h, inplace=True)
    return h


def function_and_its_input(x: Tensor, w: Tensor) -> Any:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor) -> Tensor:
            return a * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    h = x @ w
    return Doubled.apply(h), h


def function_that_writes_to_its_input(x: Tensor, w: Tensor) -> Any:
    class Shifted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor) -> Tensor:
            a.add_(1)
            ctx.mark_dirty(a)
            return a

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    h = x @ w
    return h[None], Shifted.apply(h), h.t()


def checkpoint_that_returns_a_tensor_from_outside(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    return checkpoint(lambda a: h, h, use_reentrant=False), h.contiguous()


def checkpoint_of_views_of_a_tensor_from_outside(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    view, product = checkpoint(lambda a: (h.view(-1)[2:], a @ w), x, use_reentrant=False)
    return view, product, h


def checkpoint_of_a_tensor_and_its_views(x: Tensor, w: Tensor) -> Any:
    def body(a: Tensor) -> tuple[Tensor, ...]:
        h = a @ w
        transposed = h.t()
        transposed.mul_(2)
        return transposed, h.detach(), h, h.chunk(2)[1], h.contiguous().view_as(h)

    return checkpoint(body, x, use_reentrant=False)


def checkpoint_of_two_views(x: Tensor, w: Tensor) -> Any:
    def body(a: Tensor) -> tuple[Tensor, ...]:
        h = a @ w
        return h.view(-1)[3:], h[:3], h.sin()

    return checkpoint(body, x, use_reentrant=False)


def checkpoint_of_views_from_another(x: Tensor, w: Tensor) -> Any:
    def inner(a: Tensor) -> tuple[Tensor, ...]:
        h = a @ w
        return h.t(), h[1:]

    def outer(a: Tensor) -> tuple[Tensor, ...]:
        one, other = checkpoint(inner, a, use_reentrant=False)
        return one[2:], other.view(-1)

    return checkpoint(outer, x, use_reentrant=False)


def converted_to_the_dtype_of_another(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    return h.to(x @ x), h, h.type_as(h)[0]


def copies(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    return h.to(copy=True).contiguous(), h, h.to("cpu", copy=True), h.to(h, copy=True), h.clone()


def einsum_that_adds(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    return torch.einsum("ij->i", h), h, h.sum_to_size(1, 4)


def einsum_that_views(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    return torch.einsum("ij->ji", h), h


PROGRAMS = [
    written_twice,
    view_of_a_write,
    same_pick_twice,
    input_and_its_view,
    checkpoint_and_its_input,
    hidden_states,
    checkpoint_that_returns_its_input,
    checkpoint_written_to,
    function_and_its_input,
    function_that_writes_to_its_input,
    checkpoint_that_returns_a_tensor_from_outside,
    checkpoint_of_a_tensor_and_its_views,
    checkpoint_of_two_views,
    checkpoint_of_views_from_another,
    converted_to_the_dtype_of_another,
    copies,
    einsum_that_adds,
]
#: Sums of gradients that autocast adds in another order.
OTHER_SUMS = [einsum_that_views, checkpoint_of_views_of_a_tensor_from_outside]


@each_once("program, lowering", exhaustive(PROGRAMS, always=PROGRAMS[::2]), LOWERINGS)
def test_values_and_gradients(program: Callable[..., Any], lowering: str) -> None:
    assert_like_autocast(program, leaf(4, 4), leaf(4, 4), lowering=lowering)


@each_once(
    "program, lowering, grad",
    exhaustive([*PROGRAMS, *OTHER_SUMS], always=[*PROGRAMS[1::2], *OTHER_SUMS]),
    LOWERINGS,
    [False, True],
)
def test_what_shares_memory_under_autocast_shares_it_here(
    program: Callable[..., Any], lowering: str, grad: bool
) -> None:
    x, w = leaf(4, 4), leaf(4, 4)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
        want = torch.utils._pytree.tree_leaves(program(x, w))
    with torch.set_grad_enabled(grad):
        got = torch.utils._pytree.tree_leaves(compile_with(program, lowering)(x, w))
    for i, a in enumerate(got):
        for k, b in enumerate(got):
            shared = want[i].untyped_storage()._cdata == want[k].untyped_storage()._cdata
            assert (a.untyped_storage()._cdata == b.untyped_storage()._cdata) == shared, (i, k)


@each_once("program, lowering, scaled", exhaustive(PROGRAMS, always=PROGRAMS[::2]), LOWERINGS, [False, True])
def test_one_tensor_under_autocast_is_one_here(program: Callable[..., Any], lowering: str, scaled: bool) -> None:
    x, w = leaf(4, 4), leaf(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        want = torch.utils._pytree.tree_leaves(program(x, w))
    options = {"scaler": fxamp.GradScaler("cpu")} if scaled else {}
    got = torch.utils._pytree.tree_leaves(compile_with(program, lowering, **options)(x, w))
    assert [[a is b for a in got] for b in got] == [[a is b for a in want] for b in want]


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_dropout_beside_its_input_draws_once(lowering: str) -> None:
    def program(x: Tensor, w: Tensor) -> Any:
        hidden = x @ w
        dropped = F.dropout(hidden, 0.5)
        return dropped, dropped * 2, hidden

    dropped, doubled, _ = compile_with(program, lowering)(leaf(8, 8), leaf(8, 8))
    assert torch.equal(dropped * 2, doubled) and not dropped.all()


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_cast_of_the_programs_own_beside_a_view_of_its_source_with_a_scaler(lowering: str) -> None:
    def program(x: Tensor, y: Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            y.mean().bfloat16()
        return {"cast": x.bfloat16(), "view": x[1:]}

    x = leaf(4, 4).detach()
    result = compile_with(program, lowering, scaler=fxamp.GradScaler("cpu"))(x, x)
    assert torch.equal(result["cast"].float(), x.bfloat16().float())
    assert result["view"].untyped_storage()._cdata == x.untyped_storage()._cdata


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_copy_whose_sizes_depend_on_values_leaves_beside_its_source(lowering: str) -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = F.linear(x[x[:, 0] > 0], w)
        return h, h.t().contiguous()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert_like_autocast(program, leaf(6, 8), leaf(4, 8), lowering=lowering)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_an_input_that_is_a_view_is_cast_for_each_use(lowering: str) -> None:
    """As by autocast, whose cache holds no views: gradients meet in float32."""
    x = torch.randn(4, 4, 4, 2, generator=torch.Generator().manual_seed(0)).permute(3, 2, 1, 0).requires_grad_()
    gradients = []
    for fxamp_compiles in (False, True):
        program = compile_with(_attention, lowering) if fxamp_compiles else _attention
        with torch.autocast("cpu", torch.bfloat16, enabled=not fxamp_compiles):
            result = program(x)
        gradients += torch.autograd.grad(result.float().square().sum(), x)
    assert torch.equal(*gradients)


def _attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)
