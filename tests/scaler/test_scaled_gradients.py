"""Gradients through a scaled backward are those of eager autocast with torch's GradScaler, bit for bit."""

import copy
from typing import Any

import pytest
import torch
from support.checks.exhaustive import each_once, exhaustive
from support.oracles.scaled_runs import (
    SCALE,
    assert_same_gradients,
    by_fxamp,
    by_torch,
    compile_scaled,
    leaf,
    make_scaler,
    named,
    total,
)
from torch import Tensor, nn
from torch.nn import functional as F

import fxamp
from fxamp.errors import OptionError
from fxamp.passes.backward.scale_backward import CHECKS

LOWERINGS = ("aot_eager", "eager")


class Net(nn.Module):
    """Linear layers around a normalisation, an activation in place, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.down = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.norm(self.up(x)), inplace=True))


def in_place(x: Tensor, w: Tensor) -> Tensor:
    hidden = x @ w
    hidden += 1
    hidden[0] = x[0]
    hidden.mul_(x)
    return hidden @ w


def half_inside(x: Tensor, w: Tensor) -> Tensor:
    return (x.half() @ w.half()).half()


def returns_its_input(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return x, x @ w, w.t()


def doubles(x: Tensor, w: Tensor) -> Tensor:
    return (x.double() @ w.double()).exp() + (x @ w)


def sums(x: Tensor, w: Tensor) -> Tensor:
    """The gradient is the tangent itself, expanded; and two inputs get the same one."""
    return x.sum() + w.sum()


def several(x: Tensor, w: Tensor) -> dict[str, Any]:
    return {"sum": x + w, "product": (x @ w, [w @ x]), "size": x.shape[0], "none": None}


def broken(x: Tensor, w: Tensor) -> Tensor:
    hidden = torch.tanh(x @ w)
    torch._dynamo.graph_break()
    return torch.tanh(hidden @ torch.full((4, 4), 0.25)) + x


PROGRAMS = [
    in_place,
    half_inside,
    returns_its_input,
    doubles,
    sums,
    several,
    broken,
]


@each_once("program, lowering", PROGRAMS, LOWERINGS)
def test_program(program: Any, lowering: str) -> None:
    inputs = leaf(4, 4), leaf(4, 4, seed=1)
    assert_same_gradients(by_fxamp(program, inputs, lowering), by_torch(program, inputs))


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_outputs_that_the_loss_does_not_use(lowering: str) -> None:
    def first(results: dict[str, Any]) -> Tensor:
        return total(results["product"][0])

    inputs = leaf(4, 4), leaf(4, 4, seed=1)
    assert_same_gradients(by_fxamp(several, inputs, lowering, first), by_torch(several, inputs, first))


class Cut(torch.autograd.Function):
    """Returns no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> None:
        return None


def cut_inside(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return Cut.apply(x) @ w, w @ w


def apart(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x @ x, w @ w


def cut_outside(results: tuple[Tensor, Tensor]) -> Tensor:
    return total((Cut.apply(results[0]), results[1]))


@pytest.mark.parametrize(("program", "loss"), [(cut_inside, total), (apart, cut_outside)])
def test_a_missing_gradient_stays_missing_in_an_eager_region(program: Any, loss: Any) -> None:
    inputs = leaf(4, 4), leaf(4, 4, seed=1)
    reference = by_torch(program, inputs, loss)
    assert reference.keys() == {"input 1"}
    assert_same_gradients(by_fxamp(program, inputs, "eager", loss), reference)


def with_check(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxamp.scaler.graphs.scaled_backward._check", lambda gm: check)


@pytest.mark.parametrize(("lowering", "check"), [("aot_eager", "ops"), ("aot_eager", "kernel"), ("eager", "ops")])
def test_a_sparse_gradient_is_true_and_checked(lowering: str, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_check(check, monkeypatch)
    torch.manual_seed(0)
    table = nn.Embedding(5, 4, sparse=True)
    reference, got, scaler = copy.deepcopy(table), copy.deepcopy(table), make_scaler()
    at, factor = torch.tensor([[1, 2], [1, 4]]), torch.tensor(1.0, requires_grad=True)

    def program(table: nn.Module, factor: Tensor) -> Tensor:
        return (table(at) @ torch.ones(4, 4)).float().square().mean() * factor

    with torch.autocast("cpu", torch.float16):
        (program(reference, factor) * SCALE).backward()
    compiled = compile_scaled(program, scaler, lowering)
    scaler.scale(compiled(got, factor)).backward()
    assert got.weight.grad.is_sparse and torch.equal(
        got.weight.grad.to_dense() * SCALE, reference.weight.grad.to_dense()
    )

    optimizer = torch.optim.SGD(got.parameters(), lr=0.1)
    assert not scaler.step(optimizer, return_skipped=True).skipped
    scaler.update()
    scaler.scale(compiled(got, torch.tensor(float("inf"), requires_grad=True))).backward()
    assert scaler.step(optimizer, return_skipped=True).skipped


class Alike(nn.Module):
    """Parameters of one shape, of which ``x`` chooses those whose gradients overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([weight * value for weight, value in zip(self.weights, x, strict=True)]).sum()


@pytest.mark.parametrize("check", exhaustive(CHECKS, always=["kernel"]))
def test_only_the_optimizers_of_gradients_that_overflow_skip(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_check(check, monkeypatch)
    for bad in ((), (0,), (1, 2)):
        net, scaler = Alike(), make_scaler()
        compiled = compile_scaled(net, scaler, "aot_eager")
        optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in net.weights]
        scaler.name_parameters(net)
        x = torch.tensor([3e38 if at in bad else 1.0 for at in range(3)])
        scaler.scale(compiled(x)).backward()
        skipped = [scaler.step(optimizer, return_skipped=True).skipped for optimizer in optimizers]
        assert skipped == [at in bad for at in range(3)]
        assert scaler.overflowed() == {f"weights.{at}": 1 for at in bad}
        assert [weight.tolist() for weight in net.weights] == [[1.0] * 3 if at in bad else [0.0] * 3 for at in range(3)]


def test_inductor_refuses_a_sparse_gradient_by_name() -> None:
    table, scaler = nn.Embedding(5, 4, sparse=True), make_scaler()
    compiled = compile_scaled(lambda at: table(at).sum(), scaler, "inductor")
    with pytest.raises(OptionError, match="sparse=False"):
        scaler.scale(compiled(torch.tensor([1]))).backward()


@pytest.mark.parametrize("program", [in_place, several, doubles, broken])
def test_the_kernel_gives_the_same_bits(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_check("kernel", monkeypatch)
    inputs = leaf(4, 4), leaf(4, 4, seed=1)
    assert_same_gradients(by_fxamp(program, inputs, "aot_eager"), by_torch(program, inputs))


@pytest.mark.inductor
@pytest.mark.parametrize("check", exhaustive(CHECKS, always=["ops"]))
def test_inductor_is_no_further_from_the_truth_than_eager_autocast_and_flags_an_overflow(
    check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor keeps float32 where eager rounds to float16: other roundings, as many at most."""
    with_check(check, monkeypatch)
    x, net, scaler = leaf(4, 8), Net(), make_scaler()
    exact_net, exact_x = Net().double(), x.detach().double().requires_grad_()
    exact_net(exact_x).square().sum().backward()
    exact, eager = named(exact_net, [exact_x]), by_torch(Net(), [x])
    compiled, optimizer = compile_scaled(net, scaler, "inductor"), torch.optim.SGD(net.parameters(), lr=0.0)
    for bad in (False, True, False):
        optimizer.zero_grad()
        x.grad = None
        scaler.scale(total(compiled(x)) * (1e36 if bad else 1.0)).backward()
        gradients = named(net, [x])
        assert gradients.keys() == eager.keys() == exact.keys()
        for name, gradient in gradients.items() if not bad else ():
            error, allowed = (gradient - exact[name]).norm(), (eager[name] - exact[name]).norm()
            assert error <= 2 * allowed + torch.finfo(torch.float16).eps * exact[name].norm(), name
        assert scaler.step(optimizer, return_skipped=True).skipped is bad
        scaler.update()


@pytest.mark.inductor
def test_the_gradient_of_a_convolution_is_not_copied() -> None:
    """Inductor has it in channels_last, and autograd would copy it to the layout of the weight."""
    net = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    returned: dict[int, int] = {}
    for at in (0, 2):
        net[at].weight.register_hook(lambda gradient, at=at: returned.update({at: gradient.data_ptr()}))
    scaler = fxamp.GradScaler("cpu", init_scale=8.0)
    compiled = torch.compile(lambda x: net(x), backend="fxamp", options={"scaler": scaler, "policy": "cpu-bfloat16"})
    scaler.scale(compiled(torch.randn(2, 4, 8, 8)).float().square().mean()).backward()
    assert returned == {at: net[at].weight.grad.data_ptr() for at in (0, 2)}
