"""Every order of backward, unscale_, clip_grad_norm_, step and update: fxamp refuses and computes what torch does."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from support.checks.exhaustive import exhaustive
from support.oracles.side_by_side import Raised, Scaler, assert_same, outcome
from torch import nn

import fxamp

CALLS = ("backward", "overflow", "unscale_", "clip", "step", "update")
LENGTHS = (3, 4)
SCALE, MAX_NORM = 1024.0, 0.5


class Line(nn.Module):
    """Its weight's gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


class Loop:
    """A scaler, an optimizer, and a model whose gradient is known; ``restart`` begins the next program.

    Gradients are stale that torch would take for what they are not: those of a backward between unscale_ and update,
    and those that an update has left behind unscaled. torch computes garbage with them; what it refuses is comparable.
    """

    def __init__(self, scaler: Scaler, compiled: bool = False) -> None:
        self.scaler, self.model = scaler, Line()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        if compiled:
            options = {"scaler": scaler, "policy": "cpu-bfloat16", "lowering": "eager"}
            self.model.compile(backend="fxamp", options=options)
        self.restart()
        for call in ("backward", "step", "update"):
            self.run(call)
        self.start = self.scaler.state_dict()

    def restart(self) -> None:
        self.checked = self.clipped = self.stale = False
        self.optimizer.zero_grad()
        with torch.no_grad():
            self.model.weight.fill_(1.0)

    def rewind(self) -> None:
        """Undo what the last program left: an update ends it, and the scale is what it was."""
        self.restart()
        self.run("backward")
        outcome(partial(self.run, "step"))
        self.run("update")
        self.scaler.load_state_dict(self.start)
        self.restart()

    def run(self, call: str) -> Any:
        if call in ("backward", "overflow"):
            self.stale = self.checked
            self.optimizer.zero_grad()
            x = torch.full((4,), float("inf") if call == "overflow" else 0.25)
            return self.scaler.scale(self.model(x)).backward()
        return getattr(self, call)()

    def unscale_(self) -> None:
        self.scaler.unscale_(self.optimizer)
        self.checked = True

    def clip(self) -> float:
        norm = float(self.norm())
        self.clipped = self.checked = True
        return norm

    def norm(self) -> torch.Tensor:
        return self.scaler.clip_grad_norm_(self.optimizer, MAX_NORM)

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.checked = True

    def update(self) -> None:
        self.scaler.update()
        self.stale |= self.checked
        self.checked = self.clipped = False


class TorchLoop(Loop):
    """torch has no clip_grad_norm_: its loops call unscale_, unless they have, and torch.nn.utils' function."""

    def norm(self) -> torch.Tensor:
        record = self.scaler._per_optimizer_states[id(self.optimizer)]
        if record["stage"] is not torch.amp.grad_scaler.OptState.UNSCALED or self.clipped:
            self.scaler.unscale_(self.optimizer)
        return nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)


LOOPS: dict[str, Callable[[], Loop]] = {
    "host": lambda: Loop(fxamp.GradScaler("cpu", SCALE)),
    "device": lambda: Loop(fxamp.GradScaler("cpu", SCALE, skip="device", step_lowering="aot_eager")),
    "compiled, host": lambda: Loop(fxamp.GradScaler("cpu", SCALE), True),
    "compiled, device": lambda: Loop(
        fxamp.GradScaler("cpu", SCALE, skip="device", step_lowering="aot_eager", graph_norm=True), True
    ),
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("length", exhaustive(LENGTHS, LENGTHS[:1]))
def test_every_order_of_calls_is_refused_or_computed_as_by_torch(name: str, length: int) -> None:
    ours, theirs = LOOPS[name](), TorchLoop(Scaler("cpu", SCALE))
    for program in product(CALLS, repeat=length):
        for loop in (ours, theirs):
            loop.rewind()
            loop.run("backward")
        garbage = False
        for place, call in enumerate(program):
            our, their = (outcome(partial(loop.run, call)) for loop in (ours, theirs))
            shown = f"{name}: backward, {', '.join(program[: place + 1])}: fxamp {our}, torch {their}"
            garbage |= theirs.stale or ours.stale
            assert isinstance(our, Raised) == isinstance(their, Raised), shown
            if isinstance(their, Raised):
                assert our.kind is their.kind, shown
            elif not garbage:
                _assert_alike(our, their, ours, theirs, shown)


def _assert_alike(our: Any, their: Any, ours: Loop, theirs: Loop, shown: str) -> None:
    if isinstance(their, float):  # a norm: of other roundings, and inf where the gradients overflowed
        torch.testing.assert_close(our, their, rtol=1e-6, atol=0, equal_nan=True, msg=shown)
    torch.testing.assert_close(ours.model.weight, theirs.model.weight, rtol=1e-6, atol=0, msg=shown)
    assert_same(ours.scaler.state_dict(), theirs.scaler.state_dict())
