"""The option "scaler": what it takes, which policy it brings, and what it does not go with."""

from dataclasses import replace

import pytest
import torch
from support.oracles.scaled_runs import SCALE, leaf, make_scaler
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

import fxamp
from fxamp.backend.options import parse_options
from fxamp.errors import OptionError
from fxamp.scaler.graphs.scaled_backward import Scaling


def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def compiled(**options: object) -> object:
    return torch.compile(product, backend="fxamp", options={"lowering": "aot_eager"} | options)(leaf(4, 4), leaf(4, 4))


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler("cpu"), 2.0**16, fxamp.GradScaler])
def test_anything_else_than_a_scaler_of_fxamp_is_refused(scaler: object) -> None:
    with pytest.raises(OptionError, match=r"option 'scaler' is .*accepted: an fxamp\.GradScaler"):
        parse_options({"scaler": scaler})


def test_a_disabled_scaler_counts_as_none() -> None:
    scaler = make_scaler(enabled=False)
    assert parse_options({"scaler": scaler}).scaler is None
    assert parse_options({"scaler": None}).scaler is None
    assert parse_options({"scaler": (enabled := make_scaler())}).scaler is enabled
    output = compiled(scaler=scaler, policy="cpu-float16")
    output.sum().backward()
    assert (scaler.get_scale(), scaler.loss_scale, scaler.graphs.attached) == (1.0, 1.0, False)


def test_auto_is_float16_with_a_scaler_and_an_ambient_autocast_still_wins() -> None:
    def policy(scaler: fxamp.GradScaler | None) -> str:
        torch._dynamo.reset()
        function = torch.compile(product, backend="fxamp", options={"lowering": "eager", "scaler": scaler})
        function(leaf(4, 4), leaf(4, 4))
        return fxamp.report(function).graphs[-1].policy

    assert policy(make_scaler()) == "cpu-float16"
    with torch.autocast("cpu", torch.bfloat16):
        assert policy(make_scaler()) == "cpu-bfloat16"
    assert policy(make_scaler(enabled=False)) != "cpu-float16"


@pytest.mark.parametrize("lowering", ["aot_eager", "eager"])
def test_a_policy_may_hand_float16_from_graph_to_graph(lowering: str) -> None:
    """Gradients of 2e-9 cross the break in float16, where they hold the scale; all leaves get the true ones."""
    keep = replace(fxamp.Policy.load("cpu-float16"), outputs="keep")

    def program(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        hidden = x @ v
        torch._dynamo.graph_break()
        return hidden.to(w.dtype) @ w if hidden.dtype != w.dtype else hidden @ w

    scaler = make_scaler(2.0**20)
    function = torch.compile(program, backend="fxamp", options={"policy": keep, "scaler": scaler, "lowering": lowering})
    x, v, w = leaf(4, 4), leaf(4, 4), leaf(4, 4)
    output = function(x, v, w)
    assert output.dtype is torch.float16 and len(fxamp.report(function).graphs) == 2
    scaler.scale(output.float().sum() * 2.0**-29).backward()
    expected = torch.autograd.grad((x @ v @ w).sum() * 2.0**-29, (x, v, w))
    for tensor, gradient in zip((x, v, w), expected, strict=True):
        assert tensor.grad is not None
        torch.testing.assert_close(tensor.grad, gradient, rtol=1e-2, atol=1e-2 * float(gradient.abs().max()))


def test_the_scaler_is_attached_when_it_is_given_to_torch_compile() -> None:
    """Whether or not a graph is ever compiled."""
    scaler, loss = make_scaler(), torch.ones(())
    assert scaler.scale(loss).item() == SCALE
    scaler.update(SCALE)
    torch.compile(product, backend="fxamp", options={"scaler": scaler, "lowering": "aot_eager"})
    assert scaler.scale(loss) is loss


def test_a_loss_scaled_before_the_backend_was_called_is_refused() -> None:
    scaler = make_scaler()
    scaler.scale(torch.ones(()))
    with pytest.raises(OptionError, match="after it had scaled a loss itself"):
        scaler.attach()
    with pytest.raises(BackendCompilerFailed, match="after it had scaled a loss itself"):
        compiled(scaler=scaler)


def test_numbers_read_right_in_both_modes() -> None:
    alone, scaler = make_scaler(), make_scaler()
    compiled(scaler=scaler)
    for one in (alone, scaler):
        one.scale(torch.ones(()))
    assert (alone.get_scale(), alone.loss_scale) == (SCALE, SCALE)
    assert (scaler.get_scale(), scaler.loss_scale) == (1.0, SCALE)
    assert scaler.state_dict() == alone.state_dict()
    again = make_scaler(2.0)
    again.load_state_dict(scaler.state_dict())
    assert again.loss_scale == SCALE


def test_differentiating_a_compiled_backward_names_the_lowering_that_can() -> None:
    scaler = make_scaler()
    function = torch.compile(product, backend="fxamp", options={"scaler": scaler, "lowering": "aot_eager"})
    x, w = leaf(4, 4), leaf(4, 4)
    (gradient,) = torch.autograd.grad(function(x, w).square().sum(), [w], create_graph=True)
    with pytest.raises(fxamp.errors.DoubleBackwardError, match="'lowering': 'eager'"):
        gradient.sum().backward()
    # Asking for a graph that is then not used is no mistake.
    torch.autograd.grad(function(x, w).sum(), [w], create_graph=True)
    function(x, w).sum().backward()


@pytest.mark.parametrize("depth", [2, 3])
def test_the_eager_lowering_can_be_differentiated_again(depth: int) -> None:
    """Powers of a small matrix of small whole numbers: float16 holds all values, scaled and not, exactly."""
    scaler = make_scaler(2.0**2)
    function = torch.compile(power, backend="fxamp", options={"scaler": scaler, "lowering": "eager"})
    results = []
    for call in (function, power):
        x = torch.tensor([[1.0, 2.0], [0.0, 1.0]], requires_grad=True)
        # Squared outside of the graph, so that derivatives flow into the tangents too.
        value = call(x).square().sum()
        for _ in range(depth):
            (gradient,) = torch.autograd.grad(value, [x], create_graph=True)
            value = value + gradient.sum()
        value.backward()
        results.append(x.grad)
    assert results[1].any()
    assert torch.equal(*results)


def power(x: Tensor) -> Tensor:
    return x @ x


@pytest.mark.parametrize("inside", [False, True])
def test_results_leave_as_autocast_s_would_and_their_gradients_hold_the_scale(inside: bool) -> None:
    """The true gradients would underflow in float16 before the graph could scale them."""

    def program(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=inside):
            return x @ w

    scaler = make_scaler(2.0**20)
    options = {"policy": "cpu-float16", "scaler": scaler, "lowering": "aot_eager"}
    function = torch.compile(program if inside else product, backend="fxamp", options=options)
    x, w = leaf(4, 4), leaf(4, 4)
    with torch.autocast("cpu", torch.float16, enabled=not inside):
        output = function(x, w)
    assert output.dtype is torch.float16
    scaler.scale(output.float().sum() * 2.0**-30).backward()
    expected = x.detach().sum(0)[:, None].expand(4, 4) * 2.0**-30
    assert w.grad is not None
    torch.testing.assert_close(w.grad, expected, rtol=1e-2, atol=1e-2 * 2.0**-30)


def test_compiled_autograd_is_refused_as_it_passes_the_scaling_by() -> None:
    with torch._dynamo.config.patch(compiled_autograd=True), pytest.raises(OptionError, match="compiled_autograd"):
        Scaling(make_scaler(), fxamp.Policy.load("cpu-float16")).refuse("aot_eager", {})
