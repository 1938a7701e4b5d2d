"""A training loop's body as one compiled function: the scaler stays out of its graphs, the numbers stay the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from support.checks.exhaustive import each_once
from support.oracles.scaled_runs import compile_scaled, make_scaler
from support.programs.small_models import Perceptron
from torch import Tensor, nn
from torch.fx import GraphModule

import fxamp
from fxamp.backend.entry_point import fxamp as fxamp_backend

INF = float("inf")
PACKAGE = Path(fxamp.__file__).parent
STEPS = 5

Loop = Callable[[nn.Module, Tensor, torch.optim.Optimizer, Any], Any]


def plain(net: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer, scaler: Any) -> Tensor:
    loss = net(x).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss


def clipped(net: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer, scaler: Any) -> tuple[Tensor, Tensor]:
    loss = net(x).float().square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss, norm


def accumulated(net: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer, scaler: Any) -> Tensor:
    for part in x.chunk(2):
        loss = net(part).float().square().mean() / 2
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss


def run(loop: Loop, scaler: Any, compiled: Any = None) -> tuple[list[Tensor], list[Any]]:
    net = Perceptron(4, 8, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    step = loop if compiled is None else compiled(loop)
    results, scales = [], []
    for number in range(STEPS):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(number))
        if number == 2:
            x[0] = INF
        with torch.autocast("cpu", torch.float16, enabled=compiled is None):
            results.append(step(net, x, optimizer, scaler))
        scales.append(getattr(scaler, "loss_scale", None) or scaler.get_scale())
    return [p.detach() for p in net.parameters()], [results, scales]


@each_once("attached, loop", [True, False], [plain, clipped, accumulated])
def test_the_loop_trains_as_autocast_with_torchs_scaler_does(loop: Loop, attached: bool) -> None:
    reference, expected = run(loop, torch.amp.GradScaler("cpu", init_scale=2.0**8))
    scaler = make_scaler()
    options: dict[str, Any] = {"policy": "cpu-float16", "lowering": "aot_eager"}
    if attached:
        options["scaler"] = scaler
    got, numbers = run(loop, scaler, lambda body: torch.compile(body, backend="fxamp", options=options))
    assert_equal(got, reference)
    assert_equal(numbers, expected, equal_nan=True)
    assert scaler.skipped_steps == 1 and expected[1][-1] == 2.0**7


def test_every_property_of_a_scaler_can_be_read_in_a_compiled_function() -> None:
    scaler, net = make_scaler(), Perceptron(4, 8, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)

    def body(x: Tensor) -> list[Any]:
        scaler.scale(net(x).sum()).backward()
        norm = scaler.clip_grad_norm_(optimizer, 1.0)
        skipped = scaler.step(optimizer, return_skipped=True).skipped
        scaler.update()
        scaler.name_parameters(net)
        answers = [
            scaler.get_scale(),
            scaler.loss_scale,
            scaler.skipped_steps,
            scaler.overflowed(),
            scaler.poll_steps(),
        ]
        return [norm.isfinite().item(), skipped, *answers]

    step = compile_scaled(body, scaler, "aot_eager")
    assert step(torch.ones(2, 4)) == [True, False, 1.0, 2.0**8, 0, {}, [True]]
    bad = step(torch.full((2, 4), INF))
    assert bad[:5] == [False, True, 1.0, 2.0**7, 1]
    # The last bias's gradient is the sum of tangents, whatever the input.
    assert set(bad[5]) == {"first.weight", "first.bias", "last.weight"}


def test_another_compilers_function_breaks_at_the_scaler_too() -> None:
    reference, expected = run(plain, torch.amp.GradScaler("cpu", init_scale=2.0**8))
    scaler = fxamp.GradScaler("cpu", init_scale=2.0**8)
    net_loop = torch.compile(plain, backend="eager")
    got, numbers = run(net_loop, scaler)
    assert_equal(got, reference)
    assert_equal(numbers, expected, equal_nan=True)


class Exact(torch.autograd.Function):
    """A product that asks for float32, in both directions."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient @ w.t(), x.t() @ gradient


@torch.compiler.disable
def outside(x: Tensor, w: Tensor) -> Tensor:
    return Exact.apply(x, w)


def with_outside(net: nn.Module, x: Tensor, scaler: Any) -> None:
    """Gradients of 1e-7, which float16 cannot hold unscaled."""
    result = net(x)
    loss = outside(result, net.last.weight).float().square().mean() * 1e-7
    scaler.scale(loss).backward()


def with_unused_results(net: nn.Module, x: Tensor, scaler: Any) -> None:
    used, _ = net.first(x), net.last(torch.tanh(net.first(x)))
    torch._dynamo.graph_break()
    scaler.scale(used.float().square().mean()).backward(retain_graph=True)


def with_a_penalty(net: nn.Module, x: Tensor, scaler: Any) -> None:
    x.requires_grad_()
    result = net(x).float()
    (slope,) = torch.autograd.grad(result.sum(), x, create_graph=True)
    scaler.scale((slope.norm(dim=1) - 1).square().mean() + result.mean()).backward()


def gradients(step: Any, scaler: Any, dtype: torch.dtype | None) -> dict[str, Tensor | None]:
    """True gradients of one step, under an ambient autocast unless ``dtype`` is None."""
    net = Perceptron(4, 8, 2)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        step(net, x, scaler)
    scaler.unscale_(torch.optim.SGD(net.parameters(), lr=0.1))
    return {name: parameter.grad for name, parameter in net.named_parameters()}


@pytest.mark.parametrize(
    ("step", "lowering", "ambient"),
    [
        (with_outside, "aot_eager", torch.float16),
        (with_outside, "eager", None),
        (with_unused_results, "aot_eager", torch.float16),
        (with_a_penalty, "eager", torch.float16),
    ],
)
def test_what_autograd_calls_in_a_compiled_step_is_not_compiled_as_a_forward(
    step: Any, lowering: str, ambient: torch.dtype | None
) -> None:
    """Gradients are those of autocast and torch's scaler, and no graph holds code of fxamp."""
    reference = gradients(step, torch.amp.GradScaler("cpu", init_scale=2.0**8), torch.float16)
    scaler, traced = make_scaler(), []

    def compiler(gm: GraphModule, inputs: list[Any]) -> Any:
        traced.extend(trace for node in gm.graph.nodes if (trace := node.meta.get("stack_trace")))
        return fxamp_backend(gm, inputs, options={"policy": "cpu-float16", "scaler": scaler, "lowering": lowering})

    got = gradients(torch.compile(step, backend=compiler), scaler, ambient)
    assert_equal(got, reference)
    assert any(gradient is not None and gradient.any() for gradient in got.values())
    assert traced and not [trace for trace in traced if str(PACKAGE) in trace]


def test_no_backward_of_fxamp_is_left_to_dynamo() -> None:
    own = [
        function for function in torch.autograd.Function.__subclasses__() if function.__module__.startswith("fxamp.")
    ]
    assert {function.__name__ for function in own} >= {"_Enter", "_Leave", "_Refuse", "_Product"}
    assert [function for function in own if not hasattr(function.backward, "__wrapped__")] == []


def test_code_that_a_backward_has_called_is_compiled_anew_for_a_forward() -> None:
    def squared(x: Tensor) -> Tensor:
        return x @ x

    @torch.compiler.disable
    def hooked(x: Tensor) -> Tensor:
        x.register_hook(squared)
        return x

    def body(x: Tensor) -> None:
        (hooked(x.sin()) * y).sum().backward()

    options = {"policy": "cpu-bfloat16", "lowering": "aot_eager"}
    x, y = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    torch.compile(body, backend="fxamp", options=options)(x)
    assert x.grad is not None and torch.equal(x.grad, (y @ y) * x.detach().cos())
    with torch.no_grad():
        rounded = torch.compile(squared, backend="fxamp", options=options)(x.detach())
    assert torch.equal(rounded, (x.bfloat16() @ x.bfloat16()).float()) and not torch.equal(rounded, x @ x)
