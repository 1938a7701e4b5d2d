"""A scaler in the options, and Dynamo compiles nothing: ``.grad`` holds true gradients all the same."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from support.checks.exhaustive import exhaustive
from torch import Tensor, nn

import fxamp
from fxamp.backend import fxamp as backend

SCALE = 2.0**10


class Experts(nn.Module):
    """Dynamo skips a function with a size that depends on values in a loop: any eager loop over experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        best, out = self.router(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            tokens = torch.where(best == number)[0]
            out.index_add_(0, tokens, expert(x[tokens]).to(out.dtype))
        return out


def skipped(options: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    model = Experts()
    model.compile(backend="fxamp", options=options)
    return model, model


def returned(options: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    model = Experts()
    return model, torch.compile(model, backend="fxamp", options=options)


def never_called(options: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    model = Experts()
    torch.compile(model, backend="fxamp", options=options)
    return model, model


def of_torch(options: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    model = nn.Sequential(Experts())
    model.compile(backend="fxamp", options=options)
    return model, model


def bound(options: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    model = Experts()
    model.compile(backend=partial(backend, options=options))
    return model, model


def copied(options: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    model = copy.deepcopy(skipped(options)[0])
    return model, model


def in_float32(options: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    """A graph, and no policy: the program has switched autocast off."""

    class Off(Experts):
        def __call__(self, *inputs: Tensor) -> Any:
            with torch.autocast("cpu", enabled=False):
                return super().__call__(*inputs)

    model = Off()
    model.compile(backend="fxamp", options=options)
    return model, model


@contextmanager
def disabled() -> Iterator[None]:
    with torch._dynamo.config.patch(disable=True):
        yield


Make = Callable[[dict[str, Any]], tuple[nn.Module, nn.Module]]


WAYS = [skipped, returned, never_called, of_torch, bound, copied, in_float32]


@pytest.mark.parametrize("make", exhaustive(WAYS, always=[skipped, never_called, in_float32]))
@pytest.mark.parametrize("half", exhaustive([True, False], always=[True]))
def test_gradients_are_true(make: Make, half: bool) -> None:
    """Clipped without unscale_, as the README promises, they train as torch's unscaled and clipped ones."""
    scaler = fxamp.GradScaler("cpu", init_scale=SCALE)
    model, call = make({"lowering": "aot_eager", "scaler": scaler})
    assert trained(model, call, scaler, half) == trained(*[copy.deepcopy(fresh(model))] * 2, None, half)


@pytest.mark.parametrize("half", [True, False])
def test_gradients_are_true_while_compiling_is_disabled(half: bool) -> None:
    """Fails as the test above does: on the norms and weights."""
    with disabled():
        test_gradients_are_true(skipped, half)


def fresh(model: nn.Module) -> nn.Module:
    """An uncompiled model of the same class, with the weights that :func:`trained` starts from."""
    return nn.Sequential(Experts()) if isinstance(model, nn.Sequential) else type(model)()


def trained(model: nn.Module, call: nn.Module, scaler: fxamp.GradScaler | None, half: bool) -> list[Any]:
    """Norms and weights of three steps; with torch's scaler and ``unscale_`` unless there is a ``scaler``."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 4)
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.1), []
    used = torch.amp.GradScaler("cpu", init_scale=SCALE) if scaler is None else scaler
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=half):
            loss = call(torch.randn(16, 8)).float().pow(2).mean()
        assert used.get_scale() == (SCALE if scaler is None else 1.0)
        used.scale(loss).backward()
        if scaler is None:
            used.unscale_(optimizer)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        used.step(optimizer)
        used.update()
    return [*norms, *(parameter.tolist() for parameter in model.parameters())]


def test_a_scaler_that_is_not_in_the_options_works_as_torchs() -> None:
    skipped({"lowering": "aot_eager", "scaler": fxamp.GradScaler("cpu")})
    scaler, weight = fxamp.GradScaler("cpu", init_scale=SCALE), torch.ones(2, requires_grad=True)
    scaler.scale(weight.sum()).backward()
    assert torch.equal(weight.grad, torch.full((2,), SCALE)) and scaler.get_scale() == SCALE


def test_a_scaler_that_scaled_a_loss_before_is_attached_after_the_update() -> None:
    scaler, weight = fxamp.GradScaler("cpu", init_scale=SCALE), torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum()).backward()
    skipped({"lowering": "aot_eager", "scaler": scaler})
    assert scaler.get_scale() == SCALE  # the gradient in memory holds it
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight, torch.full((2,), -1.0))
    assert scaler.get_scale() == 1.0
