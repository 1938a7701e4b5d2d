"""What random programs cannot ask: checkpoints that draw and write, branches, dynamic sizes, opaque ops."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from support.checks.exhaustive import exhaustive
from support.machines.lacks import needs_writing_loops
from support.oracles.like_autocast import assert_like_autocast, compile_with, leaf, leaves, run
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fxamp.errors import CaptureError
from fxamp.reports import registry

LOWERINGS = ("eager", "aot_eager")


class Residual(nn.Module):
    """Linear, normalisation, activation, dropout, and a residual connection."""

    def __init__(self, norm: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.up = nn.Linear(8, 8)
        self.norm = norm
        self.down = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(F.gelu(self.norm(self.up(x)))))


def conditional(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 1e9, lambda a, b: (a @ b).relu(), lambda a, b: a @ b @ a, (x, w)) * x


@pytest.mark.parametrize("lowering", exhaustive(LOWERINGS, always=["aot_eager"]))
def test_gradients_of_a_bfloat16_input_do_not_meet_in_float16(lowering: str) -> None:
    """Each is finite in float16, their sum is not."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((x @ w).float() + (x @ (w + 1)).float()).sum() * 120

    x, w = torch.ones(4, 8, dtype=torch.bfloat16).requires_grad_(), torch.full((8, 8), 40.0)
    with torch.autocast("cpu", torch.float16):
        program(x, w).backward()
    expected, x.grad = x.grad, None
    compile_with(program, lowering, policy="cpu-float16")(x, w).backward()
    assert x.grad is not None and x.grad.isfinite().all() and torch.equal(x.grad, expected)


@pytest.mark.parametrize("lowering", exhaustive(LOWERINGS, always=["aot_eager"]))
def test_gradients_of_one_value_under_two_names_are_summed_in_autocasts_order(lowering: str) -> None:
    """A product reads a value and what a conversion returned unchanged: autocast casts the last operand first."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = F.layer_norm(x, (8,))
        return torch.addmm(w, h, h.float()) + h.tanh() * h.sigmoid()

    assert_like_autocast(program, leaf(8, 8), leaf(8), lowering=lowering)


@pytest.mark.parametrize("bessel", [torch.special.i1, torch.special.i1e])
def test_an_op_whose_backward_has_no_16_bit_kernel_runs_in_float32(bessel: Callable[..., torch.Tensor]) -> None:
    program, oracle = lambda x, w: bessel(x @ w), lambda x, w: bessel((x @ w).float())
    assert_like_autocast(program, leaf(4, 8), leaf(8, 8), oracle=oracle)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_an_op_that_refuses_the_dtype_of_what_it_writes_to_writes_to_a_copy(lowering: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor, copies: bool = False) -> torch.Tensor:
        h, inverse = (x @ w) * 1, (w @ w).detach()
        part, matrix = h[:, :4], w.detach() + 4 * torch.eye(8)
        if copies:
            part.copy_(part.float().cumsum(1))
            inverse.copy_(torch.linalg.inv(matrix))
        else:
            part = part.cumsum_(1, dtype=torch.float32)
            torch.linalg.inv(matrix, out=inverse)
        part.mul_(2)
        return h @ inverse

    assert_like_autocast(program, leaf(4, 8), leaf(8, 8), lowering=lowering, oracle=partial(program, copies=True))


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("around", [True, False])
def test_an_op_without_a_16_bit_kernel_writes_float32_values_of_16_bit_inputs(around: bool, lowering: str) -> None:
    """Autocast casts inside of it."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        condition = torch.empty(())
        torch.linalg.cond((x @ w).detach(), out=condition)
        return x @ w + condition

    assert_like_autocast(program, leaf(4, 8), leaf(8, 4), lowering=lowering, around=around)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_tensors_that_a_call_of_several_results_wrote_to_are_read(lowering: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        h = x @ w
        with torch.no_grad():
            values, indices = torch.empty_like(h), torch.empty(h.shape, dtype=torch.int64)
            largest, places = h.new_empty(4), indices.new_empty(4)
            torch.sort(h, 1, out=(values, indices))
            returned, _ = torch.max(values * 2, 1, out=(largest, places))
            largest.add_(1)
        return [h * values, h.gather(1, indices), h.t() * largest, h.t() * returned, places]

    assert_like_autocast(program, leaf(4, 8), leaf(8, 8), lowering=lowering)


def rounded_down(h: torch.Tensor) -> torch.Tensor:
    """The first six bits of each mantissa."""
    return (h.detach().view(torch.int32) & -(2**17)).view(torch.float32)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_bits_are_those_of_the_captured_dtype(lowering: str) -> None:
    """16-bit values would make half as many integers, of two values each."""

    def program(x: torch.Tensor, w: torch.Tensor, widen: bool = False) -> list[torch.Tensor]:
        h, g = (product.float() if widen else product for product in (x @ w, (x @ w).relu_()))
        bits = h.detach().view(torch.uint8).float()
        return [rounded_down(h) @ w, h + (rounded_down(h) - h.detach()), bits, g.detach().view(torch.float32) @ w]

    assert_like_autocast(program, leaf(4, 8), leaf(8, 8), lowering=lowering, oracle=partial(program, widen=True))


@pytest.mark.parametrize("written", ["itself", "view"])
def test_bits_that_are_written_to_are_refused_by_name(written: str) -> None:
    """The bits are those of a cast, which the write would miss, or reach alone."""

    def program(x: torch.Tensor) -> torch.Tensor:
        h = (x @ x).detach()
        bits = h.view(torch.int32)
        (h if written == "itself" else bits).zero_()
        return (h + bits).sum()

    with pytest.raises(CaptureError, match=r"view.dtype at .* shares memory with detach, .* clone\(\) of it before"):
        compile_with(program)(leaf(8, 8))


def test_dropout_masks_the_gradient_as_it_masks_the_value() -> None:
    compiled = compile_with(lambda x: F.dropout(x @ torch.eye(8), 0.5), "aot_eager")
    x = leaf(8, 8)
    result = compiled(x)
    result.sum().backward()
    assert x.grad is not None and 0 < (result == 0).sum() < 64
    assert torch.equal(x.grad == 0, result == 0)


class Checkpointed(nn.Module):
    """A checkpoint in a checkpoint, each with dropout. ``outer``: options of the outer one."""

    def __init__(self, **outer: Any) -> None:
        super().__init__()
        self.block, self.outer = Residual(nn.LayerNorm(8), dropout=0.5), outer

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(checkpoint(self.block, x, use_reentrant=False), 0.5) * x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False, **self.outer)
        return result


@pytest.mark.parametrize("outer", [{}, {"determinism_check": "none"}])
def test_a_checkpoint_draws_the_same_numbers_again(outer: dict[str, Any]) -> None:
    assert_like_autocast(Checkpointed(**outer), leaf(4, 8))
    state = torch.get_rng_state()
    run(Checkpointed(**outer), (leaf(4, 8),), torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), state)


class Counting(nn.Module):
    """Blocks that write to buffers, and multiply by one of them; each in a checkpoint or, as the oracle, in none."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.linears, self.norm = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]), nn.BatchNorm1d(8, affine=False)
        self.register_buffer("calls", torch.ones(8))

    def block(self, x: torch.Tensor, linear: nn.Module) -> torch.Tensor:
        self.calls.add_(1)
        return self.norm(linear(x)).relu() * self.calls.clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            x = checkpoint(self.block, x, linear, use_reentrant=False) if self.checkpointed else self.block(x, linear)
        return x


@pytest.mark.parametrize("lowering", exhaustive(LOWERINGS, always=["aot_eager"]))
def test_a_checkpoint_writes_to_its_buffers_once(lowering: str) -> None:
    plain, compiled = Counting(checkpointed=False), compile_with(Counting(checkpointed=True), lowering)
    compiled.load_state_dict(plain.state_dict())
    (expected,), gradients = run(plain, (leaf(4, 8),), torch.bfloat16)
    (result,), ours = run(compiled, (leaf(4, 8),))
    assert torch.equal(result, expected.float())
    assert_equal(ours, gradients)
    assert_equal([*compiled.buffers()], [*plain.buffers()])


def test_a_selective_checkpoint_asks_its_policy() -> None:
    asked: list[Any] = []

    def saves_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked.append(op)
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    compiled = compile_with(Checkpointed(context_fn=partial(create_selective_checkpoint_contexts, saves_products)))
    run(compiled, (leaf(4, 8),))
    assert torch.ops.aten.addmm.default in asked


@pytest.mark.parametrize("lowering", exhaustive(LOWERINGS, always=["aot_eager"]))
def test_a_cond_is_its_branch(lowering: str) -> None:
    """The oracle is the branch itself: eager torch.cond under autocast differs from it in its gradient."""

    def branch(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w @ x * x

    assert_like_autocast(conditional, leaf(4, 4), leaf(4, 4), lowering=lowering, oracle=branch)


def test_a_loop_goes_round_in_the_dtypes_that_it_was_captured_with() -> None:
    def body(i: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return i + 1, value * 0.5 + 1

    def looped(x: torch.Tensor) -> torch.Tensor:
        start = (torch.tensor(0), x.exp())
        result: torch.Tensor = torch._higher_order_ops.while_loop(lambda i, _: i < 2, body, start)[1]
        return result

    x, twin = leaf(4, 4), leaf(4, 4)
    result = compile_with(looped, "eager")(x)
    result.sum().backward()
    expected = body(torch.tensor(0), body(torch.tensor(0), twin.exp())[1])[1]
    expected.sum().backward()
    assert torch.equal(result, expected)
    assert x.grad is not None and torch.equal(x.grad, twin.grad)


@pytest.mark.parametrize("lowering", exhaustive(LOWERINGS, always=["aot_eager"]))
def test_the_gradients_of_a_leaf_that_a_scan_reads_are_summed_as_autocast_does(lowering: str) -> None:
    """Both products read one cast of the leaf, although a scan that reads the leaf is between them."""

    def program(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = x @ w
        if torch.compiler.is_compiling():
            torch._higher_order_ops.scan(lambda a, b: (a + b, a * 2), x[0] * 0.5, x)
        return first, (x @ v).tanh()

    assert_like_autocast(program, leaf(8, 8), leaf(8, 8), leaf(8, 8), lowering=lowering)


@needs_writing_loops
@pytest.mark.parametrize("lowering", exhaustive(LOWERINGS, always=["aot_eager"]))
def test_what_a_loop_writes_to_a_value_in_bfloat16_arrives(lowering: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor, in_op: bool) -> torch.Tensor:
        h = x @ w

        def turn(i: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h.mul_(2)
            return i + 1, v * 0.5

        if not in_op:
            return h.mul_(8) * 1
        torch._higher_order_ops.while_loop(lambda i, _: i < 3, turn, (torch.tensor(0), x))
        return h * 1

    x, w = torch.randn(4, 4), torch.randn(4, 4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = program(x, w, False)
    with torch.no_grad():
        result = compile_with(program, lowering)(x, w, True)
    assert torch.equal(result, expected.float())


@needs_writing_loops
@pytest.mark.parametrize("lowering", exhaustive(LOWERINGS, always=["aot_eager"]))
def test_what_a_loop_reads_while_it_writes_to_a_buffer_is_not_written_to(lowering: str) -> None:
    """It is saved for the backward, which a write would stop."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("total", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            y = self.second(h)
            with torch.no_grad():
                torch._higher_order_ops.while_loop(lambda i, _: i < 3, partial(self._turn, h), (torch.tensor(0), x))
            return y + h.tanh()  # type: ignore[no-any-return]

        def _turn(self, h: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.total.add_(h.float().sum(0))
            return i + 1, v * 1

    model, x = Counting(), leaf(2, 4)
    compiled = compile_with(model, lowering)
    results, gradients = run(compiled, (x,))
    with torch.autocast("cpu", torch.bfloat16):
        h = model.first(x)
        expected = model.second(h) + h.tanh()
    expected.float().square().sum().backward()
    assert torch.equal(results[0], expected.float()) and torch.allclose(compiled.total, h.float().sum(0) * 3)
    assert gradients.keys() >= dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(gradients[name], parameter.grad)


def test_branches_of_a_cond_agree_on_a_dtype_where_autocast_cannot() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 1e9, lambda a, b: a + b, lambda a, b: a @ b, (x, w))

    x = torch.ones(4, 4)
    assert torch.equal(compile_with(program, "aot_eager")(x, x), torch.full((4, 4), 4.0))


@pytest.mark.parametrize("lowering", exhaustive(LOWERINGS, always=["aot_eager"]))
def test_buffers_that_change_end_as_under_autocast(lowering: str) -> None:
    model = Residual(nn.BatchNorm1d(8))
    compiled = compile_with(model, lowering)
    for _ in range(3):
        run(compiled, (leaf(4, 8),))
        run(model, (leaf(4, 8),), torch.bfloat16)
    assert model.norm.num_batches_tracked == 3
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, dict(compiled.named_buffers())[name]), name


def test_dynamic_shapes_compile_once() -> None:
    model = Residual(nn.LayerNorm(8))
    compiled = compile_with(model, "aot_eager")
    before = registry.count()
    torch._dynamo.mark_dynamic(first := leaf(3, 8), 0)
    compiled(first).sum().backward()
    for rows in (4, 5, 9):
        results, gradients = run(compiled, (leaf(rows, 8),))
        expected, expected_gradients = run(model, (leaf(rows, 8),), torch.bfloat16)
        assert torch.equal(results[0], expected[0].float())
        assert all(torch.equal(gradients[name], want) for name, want in expected_gradients.items())
    assert registry.count() == before + 1


def test_symbolic_sizes_are_no_reason_to_refuse_a_cast() -> None:
    weight = leaf(8, 8)
    compiled = compile_with(lambda x: F.linear(x.relu(), weight).sum(), "aot_eager")
    before = registry.count()
    torch._dynamo.mark_dynamic(first := leaf(2, 3, 8), 0)
    torch._dynamo.mark_dynamic(first, 1)
    for x in (first, leaf(4, 5, 8)):
        compiled(x)
    (record,) = registry.recent(before)
    assert record.ops_by_dtype["bf16"] >= 1
    assert not any(entry.overruled for entry in record.listing.entries)


def test_a_graph_break_hands_out_what_was_captured() -> None:
    dtypes: list[torch.dtype] = []

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        hidden = x @ w
        torch._dynamo.graph_break()
        dtypes.append(hidden.dtype)
        return F.conv1d(hidden[None], w[:, :, None])

    compiled = compile_with(program, "eager")
    results, gradients = run(compiled, (leaf(4, 4), leaf(4, 4)))
    assert dtypes[-1] is torch.float32
    assert gradients.keys() == {"input 0", "input 1"}
    assert all(torch.isfinite(leaf).all() for leaf in leaves(results))


def test_an_untraceable_node_keeps_its_captured_dtypes() -> None:
    @torch.library.custom_op("fxamp_test::needs_float32", mutates_args=())
    def needs_float32(x: torch.Tensor) -> torch.Tensor:
        assert x.dtype is torch.float32
        return x * 2

    @needs_float32.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.float32:
            raise RuntimeError("float32 only")
        return torch.empty_like(x)

    compiled = compile_with(lambda x, w: needs_float32(x @ w), "eager")
    x = torch.ones(4, 4)
    assert torch.equal(compiled(x, x), torch.full((4, 4), 8.0))


def test_a_custom_op_gets_no_mixture_of_dtypes_but_that_it_was_captured_with() -> None:
    """A program in float32 runs with an op that refuses mixtures, and one that a user gives a mixture gets it."""
    seen: list[tuple[torch.dtype, torch.dtype]] = []

    @torch.library.custom_op("fxamp_test::two_inputs", mutates_args=())
    def two_inputs(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        seen.append((x.dtype, w.dtype))
        return (x * w).float()

    @two_inputs.register_fake
    def _(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x, dtype=torch.float32)

    compiled = compile_with(lambda x, w: (two_inputs(x @ w, w), two_inputs(x.half(), w), two_inputs(x, w)), "eager")
    x = torch.ones(4, 4)
    product, mixture, plain = compiled(x, x)
    assert seen == [(torch.float32,) * 2, (torch.float16, torch.float32), (torch.float32,) * 2]
    assert product.unique().item() == 4.0 and mixture.unique().item() == 1.0 and torch.equal(plain, x)


class Warp(nn.Module):
    """The gradient of its sampling is scattered, and read by a convolution's backward in another memory order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.ConvTranspose2d(4, 2, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        upper = F.interpolate(self.first(x), scale_factor=2, mode="nearest")
        grid = F.affine_grid(torch.eye(2, 3)[None].expand(2, 2, 3), [2, 4, 6, 6], align_corners=False)
        sampled: torch.Tensor = self.last(F.grid_sample(upper, grid, align_corners=False))
        return sampled


@pytest.mark.exhaustive
def test_inductor_reads_no_gradient_before_the_scatter_that_makes_it() -> None:
    model, x = Warp(), torch.randn(2, 3, 6, 6)
    (_, exact), (_, autocast) = run(model, (x,)), run(model, (x,), torch.bfloat16)
    _, gradients = run(compile_with(model, "inductor"), (x,))
    for name, true in exact.items():
        assert torch.dist(gradients[name], true) <= 2 * torch.dist(autocast[name], true), name
