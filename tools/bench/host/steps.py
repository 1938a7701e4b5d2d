"""The steps whose host cost is compared: a row for each number of parameters, and the contenders of its process."""

import gc
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

#: Steps before timing starts: they compile, and make the optimizer's state.
WARM_UP = 4


@dataclass(frozen=True)
class Row:
    """A step of fxamp's and torch's: ``kind`` is one of :data:`KINDS`, of a model or an optimizer of ``parameters``.

    ``lowering``: of fxamp's graphs; torch's are compiled with the backend of that name.
    """

    kind: str
    parameters: int
    lowering: str = "inductor"


def start(row: Row) -> dict[str, Callable[[], None]]:
    """Return torch's step and fxamp's, warm; in a process of its own."""
    import torch

    torch.set_num_threads(1)
    steps = {who: KINDS[row.kind](row, who == "fxamp") for who in ("torch", "fxamp")}
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    return steps


def timed(steps: dict[str, Callable[[], None]], repeats: int, order: int) -> dict[str, float]:
    """Return each one's CPU time of a step in microseconds, over ``repeats``: the steps take turns.

    ``order``: seeds the order of turns, so that none always follows the same other one. It is this thread's CPU time:
    other processes affect it only through the caches.
    """
    spent, shuffle = dict.fromkeys(steps, 0.0), random.Random(order)
    for _ in range(repeats):
        for who in shuffle.sample(list(steps), len(steps)):
            began = time.thread_time()
            steps[who]()
            spent[who] += time.thread_time() - began
    return {who: 1e6 * seconds / repeats for who, seconds in spent.items()}


def calls(steps: dict[str, Callable[[], None]]) -> dict[str, int]:
    """Return how many functions each one's step calls: Python's and C's, as Python's own code calls them."""
    return {who: count_calls(step) for who, step in steps.items()}


def count_calls(step: Callable[[], object]) -> int:
    """Return how many functions ``step`` calls; with garbage collection off, so that no finalizer is counted."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def _training(
    row: Row, ours: bool, scaled: bool = False, skip: str = "host", convolutions: bool = False
) -> Callable[[], None]:
    """Return a training step of a chain of tiny layers, linear ones or ``convolutions``.

    torch's is compiled, under autocast, with GradScaler where ``scaled``; both have SGD, fused unless ``skip`` is
    "device": fxamp compiles the step then.
    """
    import torch
    from torch import nn

    import fxamp

    class Chain(nn.Module):
        """Dynamo compiles no class of torch's own, such as Sequential."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Conv2d(16, 16, 3, padding=1) if convolutions else nn.Linear(16, 16)
                for _ in range(row.parameters // 2)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).relu()
            return x.sum()

    torch.manual_seed(0)
    model, x = Chain(), torch.randn(1, 16, 2, 2) if convolutions else torch.randn(4, 16)
    dtype = torch.float16 if scaled else torch.bfloat16
    scaler: Any = None
    if scaled:
        scaler = fxamp.GradScaler("cpu", skip=skip) if ours else torch.amp.GradScaler("cpu")
    if ours:
        options: dict[str, Any] = {"policy": f"cpu-{str(dtype)[6:]}", "lowering": row.lowering}
        model.compile(backend="fxamp", options=options | ({"scaler": scaler} if scaled else {}))
    else:
        model.compile(backend=row.lowering)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=not (ours and skip == "device"))

    def step() -> None:
        with torch.autocast("cpu", dtype, enabled=not ours):
            loss = model(x)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()

    return step


def _stepping(row: Row, ours: bool) -> Callable[[], None]:
    """Return a step of AdamW for tiny parameters: torch's fused one, or one by ``fxamp.compile_optimizer``."""
    import torch
    from torch import nn

    import fxamp

    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(4, 4)) for _ in range(row.parameters)]
    for parameter in parameters:
        parameter.grad = torch.randn(4, 4)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=not ours)
    if ours:
        fxamp.compile_optimizer(optimizer, lowering=row.lowering)
    return optimizer.step


#: Kind of a row -> what makes one of its two steps.
KINDS: dict[str, Callable[[Row, bool], Callable[[], None]]] = {
    "plain": _training,
    "scaled": partial(_training, scaled=True),
    "scaled, skip on the device": partial(_training, scaled=True, skip="device"),
    "scaled convolutions": partial(_training, scaled=True, convolutions=True),
    "compiled optimizer": _stepping,
}
