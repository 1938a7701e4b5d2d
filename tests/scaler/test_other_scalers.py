"""A loop whose scaler is not that of its graphs gets an error or a warning; one with a scaler for each model runs."""

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.exhaustive import each_once
from torch import Tensor, nn

import fxamp
from fxamp.errors import UnscaledError

TOO_LARGE = 2.0**24
LOWERINGS = ("aot_eager", "eager")


class Net(nn.Module):
    """Its result is float32, so no float16 gradient enters the graph from outside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.relu(self.first(x))).float()
        return result


def scaler_of_fxamp() -> fxamp.GradScaler:
    return fxamp.GradScaler("cpu", TOO_LARGE)


def compiled(scaler: fxamp.GradScaler, lowering: str) -> Any:
    torch._dynamo.reset()
    options = {"scaler": scaler, "policy": "cpu-float16", "lowering": lowering}
    return torch.compile(Net(), backend="fxamp", options=options)


def trained(model: Any, scaler: torch.amp.GradScaler, steps: int = 20) -> bool:
    """Whether any step of a training was taken."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(steps):
        scaler.scale(model(torch.ones(4, 8)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return not all(map(torch.equal, model.parameters(), before))


OTHERS: dict[str, Callable[[Any, fxamp.GradScaler], tuple[Any, fxamp.GradScaler]]] = {
    "of a copied model": lambda model, scaler: (copy.deepcopy(model), scaler),
    "pickled": lambda model, scaler: (model, pickle.loads(pickle.dumps(scaler))),
    "new": lambda model, scaler: (model, scaler_of_fxamp()),
    "new, attached": lambda model, scaler: (model, attached()),
}


def attached() -> fxamp.GradScaler:
    scaler = scaler_of_fxamp()
    scaler.attach()
    return scaler


@each_once("other, lowering", OTHERS, LOWERINGS)
@pytest.mark.parametrize("before", [False, True], ids=["at once", "after training"])
def test_another_scaler_than_that_of_the_graphs_is_refused(other: str, lowering: str, before: bool) -> None:
    scaler = scaler_of_fxamp()
    model = compiled(scaler, lowering)
    if before:
        assert trained(model, scaler)
    with pytest.raises(UnscaledError, match=r"is scaled by .*, but its graphs were compiled with .*accepted: scale"):
        trained(*OTHERS[other](model, scaler))


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_scaler_that_is_copied_with_its_model_trains_it(lowering: str) -> None:
    scaler = scaler_of_fxamp()
    assert trained(*copy.deepcopy((compiled(scaler, lowering), scaler)))


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_each_model_may_have_a_scaler_of_its_own(lowering: str) -> None:
    """As in a GAN: the generator's loss runs through the critic's graph; eager code has a third scaler."""
    scalers = fxamp.GradScaler("cpu", 2.0), fxamp.GradScaler("cpu", 4.0)
    options = {"policy": "cpu-float16", "lowering": lowering}
    generator, critic = (
        torch.compile(Net(), backend="fxamp", options={**options, "scaler": scaler}) for scaler in scalers
    )
    plain, models = fxamp.GradScaler("cpu", 8.0), (generator, critic)
    x = torch.ones(4, 8)
    results: list[list[Tensor]] = []
    for scaled in (True, False):
        for model in models:
            model.zero_grad()
        losses = [critic(generator(x).detach()).square().mean(), critic(generator(x)).square().mean()]
        for loss, scaler in zip(losses, reversed(scalers), strict=True):
            (scaler.scale(loss) if scaled else loss).backward()
        results.append([parameter.grad.clone() for model in models for parameter in model.parameters()])
    torch.testing.assert_close(*results)
    assert plain.scale(Net()(x).sum()).item() == pytest.approx(8 * Net()(x).sum().item())


def warnings_of(caplog: pytest.LogCaptureFixture, run: Callable[[], object]) -> list[str]:
    with caplog.at_level(logging.WARNING, "fxamp"):
        run()
    return [record.getMessage() for record in caplog.records if "has not called the scaler" in record.getMessage()]


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("other", [torch.amp.GradScaler("cpu", TOO_LARGE), fxamp.GradScaler("cpu", enabled=False)])
def test_a_scaler_that_fxamp_does_not_see_is_warned_of(
    other: torch.amp.GradScaler, lowering: str, caplog: pytest.LogCaptureFixture
) -> None:
    (message,) = warnings_of(caplog, lambda: trained(compiled(scaler_of_fxamp(), lowering), copy.deepcopy(other)))
    assert "accepted: scale, step and update of the scaler in the options" in message


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_gradients_without_overflow_and_the_scaler_s_own_overflows_are_not_warned_of(
    lowering: str, caplog: pytest.LogCaptureFixture
) -> None:
    def run() -> None:
        model = compiled(fxamp.GradScaler("cpu", 2.0), lowering)
        for _ in range(3):
            torch.autograd.grad(model(torch.ones(4, 8)).sum(), list(model.parameters()))
            model(torch.ones(4, 8)).sum().backward()
        scaler = scaler_of_fxamp()
        assert trained(compiled(scaler, lowering), scaler) and scaler.skipped_steps

    assert not warnings_of(caplog, run)
