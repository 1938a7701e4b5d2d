"""torch.utils.swap_tensors between steps, and conversions of a module by it, which refuse what has weak references."""

import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from support.checks.exhaustive import each_once, exhaustive
from torch import Tensor, nn

import fxamp

X = torch.linspace(-1, 1, 8).view(2, 4)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).float().square().mean()


def swapped_between_steps(model: nn.Module, loss: Callable[[Tensor], Tensor], scaler: Any = None) -> list[Tensor]:
    """Train before and after a swap, a conversion to another dtype and back, and loaded weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for x in (X, X * 2):
            value = loss(x)
            (value if scaler is None else scaler.scale(value)).backward()
            (optimizer if scaler is None else scaler).step(*([] if scaler is None else [optimizer]))
            if scaler is not None:
                scaler.update()
            optimizer.zero_grad()

    train()
    gc.collect()  # Dynamo leaves cycles with weak references behind
    torch.utils.swap_tensors(model.first.weight, nn.Parameter(torch.eye(4)))
    train()
    torch.__future__.set_swap_module_params_on_conversion(True)
    model.double().float()
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    torch.__future__.set_swap_module_params_on_conversion(False)
    train()
    assert not any(map(weakref.getweakrefs, model.parameters()))
    return [parameter.detach() for parameter in model.parameters()]


def by_autocast(dtype: torch.dtype, scaler: Any = None) -> list[Tensor]:
    model = Net()

    def loss(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return model(x)

    return swapped_between_steps(model, loss, scaler)


def module_call(model: nn.Module, options: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    model.compile(backend="fxamp", options=options)
    return model


def function_of_model(model: nn.Module, options: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    compiled = torch.compile(lambda own, x: own(x), backend="fxamp", options=options)
    return lambda x: compiled(model, x)


def function_around_model(model: nn.Module, options: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    trainer = SimpleNamespace(models=[model])
    return torch.compile(lambda x: trainer.models[0](x), backend="fxamp", options=options)


WAYS = [module_call, function_of_model, function_around_model]


@each_once("way, lowering", exhaustive(WAYS, always=WAYS[:2]), ["eager", "aot_eager"])
def test_parameters_are_swapped_as_without_fxamp(way: Callable[..., Any], lowering: str) -> None:
    model = Net()
    ours = swapped_between_steps(model, way(model, {"policy": "cpu-bfloat16", "lowering": lowering}))
    assert_equal(ours, by_autocast(torch.bfloat16))


@pytest.mark.parametrize("way", WAYS)
def test_reports_name_the_graphs_of_swapped_parameters(way: Callable[..., Any]) -> None:
    model = Net()
    way(model, {"policy": "cpu-bfloat16", "lowering": "eager"})(X).backward()
    assert len(fxamp.report(model).graphs) == 1 and fxamp.report(model).outside == ()
    model.zero_grad()
    torch.utils.swap_tensors(model.first.weight, nn.Parameter(torch.eye(4)))
    assert len(fxamp.report(model).graphs) == 1 and fxamp.report(model).outside == ()
    assert fxamp.report(Net()).graphs == ()


@pytest.mark.parametrize("lowering", exhaustive(["eager", "aot_eager"], always=["aot_eager"]))
def test_parameters_that_a_scaler_names_are_swapped(lowering: str) -> None:
    model, scaler = Net(), fxamp.GradScaler("cpu", 8.0)
    scaler.name_parameters(model)
    options = {"policy": "cpu-float16", "lowering": lowering, "scaler": scaler}
    ours = swapped_between_steps(model, module_call(model, options), scaler)
    assert_equal(ours, by_autocast(torch.float16, torch.amp.GradScaler("cpu", 8.0)))
    scaler.scale(model(X * 1e6)).backward()
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert set(scaler.overflowed()) <= {name for name, _ in model.named_parameters()} and scaler.overflowed()
