"""``[optimizer] in_backward``: the same weights as a step after the backward, bit for bit, and what is refused."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from support.checks.exhaustive import exhaustive
from support.machines.lacks import needs_compiler
from torch import Tensor, nn

import fxamp
from fxamp.backend import backward_steps
from fxamp.errors import OptionError
from fxamp.optim.in_backward import _KINDS
from fxamp.policy import Policy

POLICY = Policy.loads('extends = ["cpu-bfloat16"]\n[optimizer]\nin_backward = true\n')
STEPS = 3


class Net(nn.Module):
    """A tied table, weights that the backward reads in bfloat16 and in float32, and one that only a norm reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 8)
        self.body = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.fall = nn.Linear(16, 8)
        self.factor = nn.Parameter(torch.ones(8))

    def forward(self, index: Tensor, x: Tensor) -> Tensor:
        hidden = self.fall(self.norm(torch.tanh(self.body(self.table(index) + x)))) * self.factor
        return (hidden @ self.table.weight.t()).logsumexp(-1).mean()


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gradient is handed over by itself."""
    monkeypatch.setattr(backward_steps, "GROUP", 1)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(10, (4,), generator=generator), torch.randn(4, 8, generator=generator)


def compiled(model: nn.Module, policy: Any = POLICY, lowering: str = "aot_eager") -> nn.Module:
    model.compile(backend="fxamp", options={"policy": policy, "lowering": lowering})
    return model


def stepping(model: nn.Module, kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **settings: Any) -> Any:
    return fxamp.compile_optimizer(kind(model.parameters(), lr=0.05, **settings), POLICY)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Losses of a few steps, then the weights; the rate changes with each step."""
    losses = []
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(STEPS):
        loss = model(*batch(step))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


FORMS: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in _KINDS]
FORMS += [("AdamW", form) for form in ({"foreach": True}, {"fused": True}, {"amsgrad": True, "weight_decay": 0.1})]


@pytest.mark.parametrize("form", exhaustive(FORMS, always=[("AdamW", {}), ("AdamW", {"foreach": True})]))
def test_weights_are_those_of_a_step_after_the_backward(form: tuple[str, dict[str, Any]]) -> None:
    kind, settings = getattr(torch.optim, form[0]), form[1]
    plain = compiled(Net(), "cpu-bfloat16")
    expected = train(plain, kind(plain.parameters(), lr=0.05, **settings))
    torch._dynamo.reset()
    model = compiled(Net())
    assert_equal(train(model, stepping(model, kind, **settings)), expected)


@needs_compiler
@pytest.mark.exhaustive
def test_gradients_under_inductor_are_those_of_the_weights_before_the_step() -> None:
    """The rate is so large that a gradient of stepped weights would be far from any rounding of the true one."""
    exact, plain, model = Net().double(), Net(), Net()
    exact(batch(0)[0], batch(0)[1].double()).backward()
    compiled(plain, "cpu-bfloat16")(*batch(0)).backward()
    compiled(model, POLICY, "inductor")
    optimizer = fxamp.compile_optimizer(torch.optim.SGD(model.parameters(), lr=1e6), POLICY)
    before = copy.deepcopy(model.state_dict())
    model(*batch(0)).backward()
    optimizer.step()
    for (name, truth), usual in zip(exact.named_parameters(), plain.parameters(), strict=True):
        ours = (before[name].double() - model.get_parameter(name).detach().double()) / 1e6
        assert truth.grad is not None and usual.grad is not None
        bound = 2 * (usual.grad - truth.grad).norm() + 2**-8 * truth.grad.norm()
        assert (ours - truth.grad).norm() <= bound, name


def test_gradients_are_gone_before_the_backward_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is handed over, those from before are freed; ``.grad`` stays None."""
    references: list[weakref.ref[Tensor]] = []
    living: list[int] = []
    receive = backward_steps._Run.receive

    def watching(self: Any, gradients: Any, places: Any) -> None:
        gc.collect()
        if gradients:
            living.append(sum(reference() is not None for reference in references))
        references.extend(weakref.ref(gradient.untyped_storage()) for gradient in gradients)
        receive(self, gradients, places)

    monkeypatch.setattr(backward_steps._Run, "receive", watching)
    model = compiled(Net())
    optimizer = stepping(model)
    model(*batch(0)).backward()
    assert len(living) == len(list(model.parameters())) and max(living) <= 1
    assert all(parameter.grad is None for parameter in model.parameters())
    optimizer.step()


def test_what_the_optimizer_does_not_have_gets_its_gradient() -> None:
    model, twin = compiled(Net()), compiled(Net(), "cpu-bfloat16")
    own = [parameter for name, parameter in model.named_parameters() if "norm" not in name]
    optimizer = fxamp.compile_optimizer(torch.optim.SGD(own, lr=0.1), POLICY)
    index, x = batch(0)
    x, other = (x.clone().requires_grad_() for _ in range(2))
    model(index, x).backward()
    twin(index, other).backward()
    optimizer.step()
    torch.optim.SGD([p for name, p in twin.named_parameters() if "norm" not in name], lr=0.1).step()
    assert_equal(list(model.parameters()), list(twin.parameters()))
    assert x.grad is not None and other.grad is not None and torch.equal(x.grad, other.grad)
    for name in ("weight", "bias"):
        assert torch.equal(getattr(model.norm, name).grad, getattr(twin.norm, name).grad)


@pytest.mark.parametrize("change", exhaustive(["moved", "popped", "added", "grouped"], always=["added", "moved"]))
def test_parameters_go_with_the_param_groups(change: str) -> None:
    """One that moves to another optimizer is trained by it, and one that is added by its new optimizer."""
    results = []
    for policy in (POLICY, "cpu-bfloat16"):
        torch._dynamo.reset()
        model = compiled(Net(), policy)
        moving = [model.fall.weight, model.factor]
        mine = [parameter for parameter in model.parameters() if all(parameter is not other for other in moving)]
        first = mine if change in ("added", "grouped") else list(model.parameters())
        optimizer = torch.optim.AdamW(first, lr=0.05)
        if policy is POLICY:
            fxamp.compile_optimizer(optimizer, policy)
        optimizers: list[torch.optim.Optimizer] = [optimizer]
        for step in range(2 * STEPS):
            if step == STEPS:
                if change == "moved":
                    optimizer.param_groups[0]["params"] = mine
                elif change == "popped":
                    optimizer.param_groups.pop()
                    optimizer.add_param_group({"params": mine})
                elif change == "added":
                    optimizer.param_groups[0]["params"].extend(moving)
                else:
                    optimizer.add_param_group({"params": moving, "lr": 0.5})
                if change in ("moved", "popped"):
                    optimizers.append(torch.optim.SGD(moving, lr=0.5))
            model(*batch(step)).backward()
            assert all(p.grad is None for p in optimizer.param_groups[0]["params"]) == (policy is POLICY)
            for each in optimizers:
                each.step()
            model.zero_grad()
        results.append(list(model.parameters()))
    assert_equal(*results)  # type: ignore[arg-type]


def test_both_optimizers_may_step_in_backwards_when_a_parameter_moves() -> None:
    model, twin = compiled(Net()), compiled(Net(), "cpu-bfloat16")
    pairs = []
    for own, policy in ((model, POLICY), (twin, "cpu-bfloat16")):
        norms = [*own.norm.parameters()]
        others = [parameter for name, parameter in own.named_parameters() if "norm" not in name]
        pairs.append([torch.optim.SGD(norms, lr=0.1), torch.optim.SGD(others, lr=0.3)])
        if policy is POLICY:
            pairs[-1] = [fxamp.compile_optimizer(optimizer, policy) for optimizer in pairs[-1]]
    for step in range(2 * STEPS):
        for own, pair in ((model, pairs[0]), (twin, pairs[1])):
            if step == STEPS:
                pair[0].add_param_group({"params": [pair[1].param_groups[0]["params"].pop()]})
            own(*batch(step)).backward()
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad()
    assert_equal(list(model.parameters()), list(twin.parameters()))


def test_a_parameter_that_two_optimizers_get_later_is_an_error() -> None:
    model = compiled(Net())
    own = list(model.parameters())
    first, second = (fxamp.compile_optimizer(torch.optim.SGD(part, lr=0.1), POLICY) for part in (own[:3], own[3:]))
    second.add_param_group({"params": own[:1]})
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(OptionError, match="another optimizer with in_backward has some of its parameters"):
        model(*batch(0)).backward()
    assert_equal(model.state_dict(), before)
    first.param_groups.clear()
    model(*batch(0)).backward()


def test_autograd_grad_and_inputs_step_nothing() -> None:
    model = compiled(Net())
    optimizer, before = stepping(model), copy.deepcopy(model.state_dict())
    gradients = torch.autograd.grad(model(*batch(0)), list(model.parameters()))
    assert all(gradient is not None for gradient in gradients)
    model(*batch(0)).backward(inputs=[model.factor])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if name != "factor")
    assert model.fall.weight.grad is None
    optimizer.step()


class Window(nn.Module):
    """A buffer shares the weight's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8))
        self.register_buffer("window", self.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.window.t()) @ self.weight.t()).square().sum()


@pytest.mark.parametrize("lowering", exhaustive(["aot_eager", "inductor"], always=["aot_eager"]))
def test_a_parameter_that_the_backward_reads_later_is_stepped_later(lowering: str) -> None:
    """The gradient of x reads the weight's memory in float32, after the weight's own gradient is made."""
    results = []
    wide = '[[rule]]\nid = "wide"\ncast = "fp32"\nops = ["mm", "matmul"]\n'
    for text in ('extends = ["cpu-bfloat16"]\n', 'extends = ["cpu-bfloat16"]\n[optimizer]\nin_backward = true\n'):
        torch._dynamo.reset()
        policy = Policy.loads(text + wide)
        model = compiled(Window(), policy, lowering)
        optimizer = fxamp.compile_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), policy)
        x = torch.ones(4, 8, requires_grad=True)
        model(x).backward()
        optimizer.step()
        results.append([x.grad, model.weight])
    assert_equal(results[0], results[1])  # type: ignore[arg-type]


def test_two_backwards_before_a_step_are_an_error() -> None:
    model = compiled(Net())
    optimizer = stepping(model)
    model(*batch(0)).backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"parameter group0.param0 gets a second gradient before optimizer.step\(\)"):
        model(*batch(1)).backward()
    assert_equal(model.state_dict(), before)
    optimizer.step()
    model(*batch(1)).backward()


def test_a_gradient_that_is_there_is_an_error() -> None:
    model = compiled(Net())
    optimizer = stepping(model)
    model.factor.grad = torch.zeros(8)
    with pytest.raises(RuntimeError, match=r"parameter group0.param0 has a gradient already.*set_to_none=True"):
        model(*batch(0)).backward()
    optimizer.zero_grad()
    model(*batch(0)).backward()


def drop_a_parameter(_: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"].pop()


BETWEEN: dict[str, Callable[[Any, Any], object]] = {
    r"a parameter of shape .* left its param_groups between the backward": drop_a_parameter,
    "its settings changed between the backward": lambda _, optimizer: optimizer.param_groups[0].update(lr=0.5),
    "was stepped in the backward with a part of its gradient": lambda model, _: model.factor.square().sum().backward(),
}


@pytest.mark.parametrize("message", BETWEEN)
def test_a_change_between_backward_and_step_is_an_error(message: str) -> None:
    model = compiled(Net())
    optimizer = stepping(model)
    model(*batch(0)).backward()
    BETWEEN[message](model, optimizer)
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()


OF_PARAMETER, OF_STEP = "param0 has a hook on its gradient, which would not run", "a hook runs before its step"


@pytest.mark.parametrize(
    ("register", "message"),
    [
        ("register_hook", OF_PARAMETER),
        ("register_post_accumulate_grad_hook", OF_PARAMETER),
        ("register_step_pre_hook", OF_STEP),
    ],
)
def test_hooks_before_the_step_are_an_error(register: str, message: str) -> None:
    model = compiled(Net())
    optimizer = stepping(model)
    getattr(optimizer if message == OF_STEP else model.factor, register)(lambda *_: None)
    with pytest.raises(RuntimeError, match=message):
        model(*batch(0)).backward()
    assert not optimizer.state


def test_an_optimizer_that_is_gone_steps_nothing() -> None:
    model = compiled(Net())
    stepping(model)
    gc.collect()
    model(*batch(0)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_hooks_after_the_step_run_once_for_each_step() -> None:
    model, calls = compiled(Net()), []
    optimizer = stepping(model)
    optimizer.register_step_post_hook(lambda *_: calls.append(None))
    train(model, optimizer)
    assert len(calls) == STEPS


class Mine(torch.optim.SGD):
    """An optimizer of a user's."""


def test_optimizers_that_may_not_step_one_by_one_are_refused() -> None:
    parameters = list(Net().parameters())
    for optimizer in (torch.optim.LBFGS(parameters), Mine(parameters, lr=0.1)):
        with pytest.raises(OptionError, match=f"{type(optimizer).__name__}: .* accepted: these classes of torch.optim"):
            fxamp.compile_optimizer(optimizer, POLICY)
    with pytest.raises(OptionError, match="clip_norm needs all gradients before the first step"):
        fxamp.compile_optimizer(torch.optim.SGD(parameters, lr=0.1), POLICY, clip_norm=1.0)
    with pytest.raises(OptionError, match="accepted: differentiable=False"):
        fxamp.compile_optimizer(torch.optim.SGD(parameters, lr=0.1, differentiable=True), POLICY)
    first = fxamp.compile_optimizer(torch.optim.SGD(parameters, lr=0.1), POLICY)
    with pytest.raises(OptionError, match="another optimizer with in_backward has some of its parameters"):
        fxamp.compile_optimizer(torch.optim.SGD(parameters[:1], lr=0.1), POLICY)
    fxamp.compile_optimizer(first, "cpu-bfloat16")
    fxamp.compile_optimizer(torch.optim.SGD(parameters[:1], lr=0.1), POLICY)


def test_scalers_and_float16_are_refused() -> None:
    scaler, model = fxamp.GradScaler("cpu"), Net()
    options: dict[str, Any] = {"policy": POLICY, "lowering": "aot_eager", "scaler": scaler}
    with pytest.raises(OptionError, match="option 'scaler' decides after the backward whether to step"):
        torch.compile(model, backend="fxamp", options=options)(*batch(0))
    half = Policy.loads('extends = ["cpu-float16"]\n[optimizer]\nin_backward = true\n')
    with pytest.raises(OptionError, match="in_backward = true and float16, whose loss is scaled"):
        fxamp.compile_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), half)
    torch._dynamo.reset()
    with pytest.raises(OptionError, match="in_backward = true and float16"):
        compiled(Net(), half)(*batch(0))
    other = fxamp.GradScaler("cpu")
    model = Net()
    optimizer = stepping(model)
    other.scale(model(*batch(0))).backward()
    with pytest.raises(OptionError, match="a scaler decides after the backward"):
        other.step(optimizer)


def test_what_has_no_backward_graph_or_replays_it_is_refused() -> None:
    with pytest.raises(OptionError, match="lowering = 'eager' leaves the backward to autograd"):
        compiled(Net(), POLICY, "eager")(*batch(0))
    torch._dynamo.reset()
    model = Net()
    model.compile(backend="fxamp", options={"policy": POLICY, "mode": "reduce-overhead"})
    with pytest.raises(OptionError, match="CUDA graphs would replay a backward without its steps"):
        model(*batch(0))


def test_inside_a_wrapper_that_sums_gradients_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_steps, "running_wrapper", lambda: nn.Identity())
    with pytest.raises(OptionError, match="Identity sums gradients after the graph's backward"):
        compiled(Net())(*batch(0))


def test_one_side_alone_is_logged(caplog: pytest.LogCaptureFixture) -> None:

    model = compiled(Net(), "cpu-bfloat16")
    train(model, stepping(model))
    assert "AdamW: its policy has in_backward = true, but no backward stepped anything" in caplog.text
    torch._dynamo.reset()
    model = compiled(Net())
    train(model, torch.optim.AdamW(model.parameters()))
    assert "has in_backward = true, but no optimizer steps in backwards" in caplog.text
