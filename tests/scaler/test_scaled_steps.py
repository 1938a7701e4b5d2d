"""What steps and what is skipped: whose flags count, what is read again, and that nothing unseen gets through."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.checks.exhaustive import each_once, exhaustive
from support.oracles.scaled_runs import compile_scaled, finish, leaf, make_scaler
from support.programs.small_models import Layer
from torch import Tensor, nn

import fxamp
from fxamp.optim.gradients import GradientGroup
from fxamp.reports import registry
from fxamp.scaler.graphs import graph_flags
from fxamp.scaler.torch_contract import gradient_check

INF = float("inf")
LOWERINGS = ("aot_eager", "eager")
Read = Callable[[], int]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """How many gradients the last check read again."""
    counts: list[int] = []
    flags, check_group = fxamp.GradScaler._flags, gradient_check.check_group

    def checking(self: fxamp.GradScaler, *arguments: Any, **options: Any) -> Any:
        counts.append(0)
        return flags(self, *arguments, **options)

    def reading(group: GradientGroup, *arguments: Any) -> Tensor:
        counts[-1] += len(group.gradients)
        return check_group(group, *arguments)

    monkeypatch.setattr(fxamp.GradScaler, "_flags", checking)
    monkeypatch.setattr(gradient_check, "check_group", reading)
    return lambda: counts[-1]


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Layer(activation=torch.tanh)


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)


def backward(scaler: fxamp.GradScaler, output: Tensor, bad: bool = False) -> None:
    """A tangent of 1e36 is fine, but not times the scale."""
    scaler.scale(output.sum() * (1e38 if bad else 1.0)).backward()


def prepared(lowering: str) -> tuple[nn.Module, fxamp.GradScaler, Callable[..., Tensor], torch.optim.Optimizer]:
    """A module, its scaler, the module compiled with it, and its optimizer."""
    net, scaler = model(), make_scaler()
    return net, scaler, compile_scaled(net, scaler, lowering), sgd(net)


@pytest.fixture(params=exhaustive(LOWERINGS, always=["aot_eager"]))
def lowering(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def test_nothing_is_read_twice_in_a_plain_loop(lowering: str, read: Read) -> None:
    _net, scaler, compiled, optimizer = prepared(lowering)
    for bad in (False, True, False):
        backward(scaler, compiled(leaf(2, 4)), bad)
        assert finish(scaler, optimizer) == [bad]
        assert read() == 0
    assert scaler.overflowed() == {"group0.param0": 1, "group0.param1": 1}
    assert (scaler.loss_scale, scaler.get_scale(), scaler.skipped_steps) == (2.0**7, 1.0, 1)


def test_accumulation_is_read_again_and_one_bad_batch_skips_the_step(lowering: str, read: Read) -> None:
    _net, scaler, compiled, optimizer = prepared(lowering)
    for batches in ([False, False], [True, False], [False, True], [False, False]):
        for bad in batches:
            backward(scaler, compiled(leaf(2, 4)), bad)
        assert finish(scaler, optimizer) == [any(batches)]
        assert read() == 2


#: How a loop drops a gradient.
DROPS: dict[str, Callable[[nn.Module], object]] = {
    "zero_grad": lambda net: net.zero_grad(),
    "one by one": lambda net: [setattr(parameter, "grad", None) for parameter in net.parameters()],
}


@each_once("drop, batches_after, skip", DROPS, [1, 2, 3], ["host", "device"])
def test_a_bad_batch_whose_gradient_was_dropped_skips_nothing(
    drop: str, batches_after: int, skip: str, lowering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with torch's scaler, whether the host knows flags at once or only the device does."""
    if skip == "device":
        monkeypatch.setattr(graph_flags, "known", lambda flags: None)
        monkeypatch.setattr(gradient_check, "known", lambda flags: None)
    net, scaler, compiled, optimizer = prepared(lowering)
    x = leaf(2, 4).detach()
    for _ in range(2):
        backward(scaler, compiled(x), bad=True)
        DROPS[drop](net)
        for _ in range(batches_after):
            backward(scaler, compiled(x))
        assert finish(scaler, optimizer) == [False]
        backward(scaler, compiled(x), bad=True)
        assert finish(scaler, optimizer) == [True]


def test_a_bad_gradient_that_was_only_computed_skips_nothing(lowering: str) -> None:
    net, scaler, compiled, optimizer = prepared(lowering)
    x = leaf(2, 4).detach()
    torch.autograd.grad(scaler.scale(compiled(x).sum() * 1e38), list(net.parameters()))
    backward(scaler, compiled(x))
    assert finish(scaler, optimizer) == [False]


def test_a_bad_gradient_that_is_assigned_skips_the_step(lowering: str) -> None:
    """Its flag counts, though a later backward found nothing."""
    net, scaler, compiled, optimizer = prepared(lowering)
    x, parameters = leaf(2, 4).detach(), list(net.parameters())
    bad = torch.autograd.grad(scaler.scale(compiled(x).sum() * 1e38), parameters)
    backward(scaler, compiled(x))
    for parameter, gradient in zip(parameters, bad, strict=True):
        parameter.grad = gradient
    assert finish(scaler, optimizer) == [True]


def test_a_bad_batch_whose_gradient_was_set_to_zero_skips_the_step(lowering: str) -> None:
    _net, scaler, compiled, optimizer = prepared(lowering)
    backward(scaler, compiled(leaf(2, 4).detach()), bad=True)
    optimizer.zero_grad(set_to_none=False)
    backward(scaler, compiled(leaf(2, 4).detach()))
    assert finish(scaler, optimizer) == [True]


def write_inf(gradient: Tensor) -> None:
    gradient[0] = INF


def assign(net: nn.Module, gradient: Tensor) -> None:
    net.linear.bias.grad = gradient


TOUCHES: dict[str, Callable[[nn.Module], object]] = {
    "written to in place": lambda net: write_inf(net.linear.bias.grad),
    "written to through a view": lambda net: write_inf(net.linear.bias.grad[1:]),
    "replaced": lambda net: assign(net, torch.full((4,), INF)),
    "replaced by a part of itself": lambda net: assign(net, net.linear.bias.grad.expand(2, 4)[1].clone() * INF),
    "added to by eager code": lambda net: (net.linear.bias.sum() * INF).backward(),
    "thrown away and made by eager code": lambda net: (net.zero_grad(), (net.linear.bias.sum() * INF).backward()),
}


@pytest.mark.parametrize("touch", TOUCHES)
def test_an_overflow_from_elsewhere_is_seen(touch: str, lowering: str, read: Read) -> None:
    net, scaler, compiled, optimizer = prepared(lowering)
    before = net.linear.bias.detach().clone()
    backward(scaler, compiled(leaf(2, 4)))
    TOUCHES[touch](net)
    assert finish(scaler, optimizer) == [True]
    assert read() >= 1
    assert torch.equal(net.linear.bias, before)


def test_memory_that_is_used_again_is_not_taken_for_what_was_checked() -> None:
    """An allocator hands out freed memory again: same address, same version, another gradient."""
    memory, scaler, parameter = bytearray(16), make_scaler(), nn.Parameter(torch.ones(4))
    scaler.attach()
    scaler.scale(torch.ones(()))
    parameter.grad = torch.frombuffer(memory, dtype=torch.float32)
    address, version = parameter.grad.data_ptr(), parameter.grad._version
    scaler.graphs.record(lambda: [weakref.ref(parameter)], torch.zeros(1, dtype=torch.bool), [parameter.grad])
    parameter.grad = None
    memory[:] = torch.full((4,), INF).numpy().tobytes()
    parameter.grad = torch.frombuffer(memory, dtype=torch.float32)
    assert (parameter.grad.data_ptr(), parameter.grad._version) == (address, version)
    assert finish(scaler, torch.optim.SGD([parameter], lr=0.1)) == [True]


def test_a_hook_that_hides_an_overflow_does_not_hide_the_flag(lowering: str) -> None:
    net, scaler, compiled, optimizer = prepared(lowering)
    net.linear.bias.register_hook(torch.nan_to_num)
    net.linear.weight.register_hook(torch.nan_to_num)
    backward(scaler, compiled(leaf(2, 4).detach()), bad=True)
    assert net.linear.bias.grad.isfinite().all()
    assert finish(scaler, optimizer) == [True]


def test_a_parameter_shared_with_eager_code_has_the_sum_of_true_gradients(lowering: str, read: Read) -> None:
    net, scaler, compiled, optimizer = prepared(lowering)
    x = leaf(2, 4).detach()
    (compiled(x).sum()).backward()
    alone = net.linear.weight.grad.clone()
    optimizer.zero_grad()
    scaler.scale(compiled(x).sum() + 3 * net.linear.weight.sum()).backward()
    torch.testing.assert_close(net.linear.weight.grad, alone + 3)
    assert finish(scaler, optimizer) == [False]
    assert read() == 1


def test_one_compiled_graph_serves_two_modules_and_knows_them_apart(lowering: str, read: Read) -> None:
    first, second, scaler = model(0), model(1), make_scaler()
    for net in (first, second):
        net.compile(backend="fxamp", options={"policy": "cpu-float16", "scaler": scaler, "lowering": lowering})
    optimizers = sgd(first), sgd(second)
    graphs = registry.count()
    for bad in ([False, False], [False, True], [True, False]):
        for net, overflows in zip((first, second), bad, strict=True):
            backward(scaler, net(leaf(2, 4).detach()), overflows)
        assert finish(scaler, *optimizers) == bad
        assert read() == 0
    assert registry.count() == graphs + 1


def test_a_parameter_in_two_graphs(lowering: str, read: Read) -> None:
    _net, scaler, compiled, optimizer = prepared(lowering)
    for bad in ([False, False], [True, False], [False, True], [True, True]):
        outputs = [
            compiled(leaf(2, 4, seed=seed)).sum() * (1e38 if overflows else 1) for seed, overflows in enumerate(bad)
        ]
        scaler.scale(outputs[0] + outputs[1]).backward()
        assert finish(scaler, optimizer) == [any(bad)]
        assert read() == 2
    assert scaler.overflowed() == {"group0.param0": 3, "group0.param1": 3}


def test_an_overflow_between_graphs_skips_though_it_reaches_no_parameter(lowering: str) -> None:
    """The second graph's input gradient overflows; a hook in eager code clamps it, and all parameters look fine."""
    first, scaler = model(0), make_scaler()
    lower = compile_scaled(first, scaler, lowering)
    upper = compile_scaled(lambda hidden: hidden.half() * 4, scaler, lowering)
    optimizer, untouched = sgd(first), sgd(model(1))
    untouched.param_groups[0]["params"][0].grad = torch.ones(4, 4)
    for bad in (True, False):
        hidden = lower(leaf(2, 4).detach())
        hidden.register_hook(lambda gradient: gradient.clamp(-1, 1))
        output = upper(hidden)
        # 200 * 2**8 is float16's, four times that is not.
        scaler.scale(output.float().sum() * (200 if bad else 1)).backward()
        assert all(p.grad.isfinite().all() for p in first.parameters())
        assert finish(scaler, optimizer, untouched) == [bad, bad]
        untouched.param_groups[0]["params"][0].grad = torch.ones(4, 4)


def test_the_scale_is_read_when_the_backward_runs(lowering: str) -> None:
    weight, scaler = leaf(4, 4), make_scaler(1.0)
    compiled = compile_scaled(lambda x, w: x @ w, scaler, lowering)
    tiny = 2.0**-30
    scaler.attach()
    scaler.scale(torch.ones(()))
    output = compiled(leaf(4, 4), weight)
    (output.sum() * tiny).backward(retain_graph=True)
    assert not weight.grad.any(), "2**-30 is below float16's smallest: unscaled it must vanish"
    scaler.update(2.0**20)
    weight.grad = None
    (output.sum() * tiny).backward()
    assert weight.grad.all()


def test_a_graph_may_be_retained_though_its_backward_was_compiled_for_one_use(lowering: str) -> None:
    """AOTAutograd lets a backward write over what it is thought to use once; the first run here is such a one."""
    weight, x, scaler = leaf(4, 4), leaf(4, 4), make_scaler()
    compiled = compile_scaled(lambda x, w: torch.tanh(torch.tanh(x @ w) @ w), scaler, lowering)
    gradients = []
    for retain in (False, True, False):
        output = compiled(x, weight)
        for again in [retain] * retain + [False]:
            weight.grad = None
            output.sum().backward(retain_graph=again)
            gradients.append(weight.grad)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


def test_two_losses_over_one_graph(lowering: str) -> None:
    weight, x, scaler = leaf(4, 4), leaf(4, 4), make_scaler()
    compiled = compile_scaled(lambda x, w: (torch.tanh(x @ w), (x @ w) * 3), scaler, lowering)
    one, two = compiled(x, weight)
    scaler.scale(one.sum()).backward(retain_graph=True)
    scaler.scale(two.sum()).backward()
    reference = leaf(4, 4)
    (torch.tanh(x @ reference).sum() + ((x @ reference) * 3).sum()).backward()
    torch.testing.assert_close(weight.grad, reference.grad, rtol=0, atol=4 * torch.finfo(torch.float16).eps * 8)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zeroed_gradients_are_summed_into_and_read_again(lowering: str, set_to_none: bool, read: Read) -> None:
    _net, scaler, compiled, optimizer = prepared(lowering)
    for _ in range(2):
        backward(scaler, compiled(leaf(2, 4)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none)
    assert read() == (0 if set_to_none else 2)


def test_a_frozen_parameter_gets_no_gradient_and_no_flag(lowering: str) -> None:
    net, scaler, compiled, optimizer = prepared(lowering)
    net.linear.weight.requires_grad_(False)
    backward(scaler, compiled(leaf(2, 4)), bad=True)
    assert net.linear.weight.grad is None
    assert finish(scaler, optimizer) == [True]
    assert scaler.overflowed() == {"group0.param1": 1}


def test_sizes_may_change(lowering: str) -> None:
    net, scaler = model(), make_scaler()
    options = {"policy": "cpu-float16", "scaler": scaler, "lowering": lowering}
    compiled, optimizer = torch.compile(net, backend="fxamp", options=options, dynamic=True), sgd(net)
    for rows in (3, 5, 7):
        for bad in (True, False):
            x = leaf(rows, 4)
            backward(scaler, compiled(x), bad)
            if not bad:
                exact = x.detach().clone().requires_grad_()
                net(exact).sum().backward()
                torch.testing.assert_close(x.grad, exact.grad, rtol=0, atol=8 * torch.finfo(torch.float16).eps)
                net.zero_grad()
                backward(scaler, compiled(leaf(rows, 4)))
            assert finish(scaler, optimizer) == [bad]


def doubling(x: Tensor, w: Tensor) -> Tensor:
    """Writes to its input."""
    x.mul_(2)
    return x @ w


def test_a_graph_that_writes_to_its_input_gets_that_tangent_scaled_too() -> None:
    scaler, gradients = make_scaler(), []
    for call in (compile_scaled(doubling, scaler, "aot_eager"), doubling):
        x, w = leaf(4, 4), leaf(4, 4, seed=1)
        inner = x * 1
        output = call(inner, w)
        (output.sum() + 3 * inner.sum()).backward()
        gradients.append([x.grad, w.grad])
    torch.testing.assert_close(*gradients, rtol=2 * torch.finfo(torch.float16).eps, atol=1e-3)


def test_the_eager_lowering_refuses_a_graph_that_writes_to_its_input() -> None:
    with pytest.raises(fxamp.FxampError, match=r"writes in place to its input 'l_x_'.*aot_eager"):
        compile_scaled(doubling, make_scaler(), "eager")(leaf(4, 4) * 1, leaf(4, 4))


def test_what_comes_out_may_be_written_to(lowering: str) -> None:
    scaler, gradients = make_scaler(), []

    def program(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    for call in (compile_scaled(program, scaler, lowering), program):
        x, w = leaf(4, 4), leaf(4, 4, seed=1)
        output = call(x, w)
        output += 1
        output.mul_(2)
        output.sum().backward()
        gradients.append([x.grad, w.grad])
    torch.testing.assert_close(*gradients, rtol=4 * torch.finfo(torch.float16).eps, atol=1e-3)
