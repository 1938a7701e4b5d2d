"""Steps of float16 training with overflows: skipped where torch's scaler skips, on the host, the device, in a graph."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import fxamp
from fxamp.tools.bench.check.check_line import Check, SkippedError, require
from fxamp.tools.bench.check.program import Net, draw
from fxamp.tools.bench.host_syncs import host_syncs

#: Steps, those whose loss is infinite, and those before a graph is captured.
STEPS, BAD, WARM = 10, (3, 4, 7), 3
_SETTINGS: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 2}


def training_checks(device: str, lowering: str) -> Iterator[Check]:
    """Yield a check for each way to skip a step, of its host syncs, and of a whole step in a CUDA graph."""
    for skip in ("host", "device"):
        for graph in (True, False):
            way = f"skip on the {skip}, scaled {'in the graph' if graph else 'by the scaler'}"
            yield Check(way, partial(_follows_torch, device, lowering, skip, graph))
    yield Check("host syncs of a step that skips on the device", partial(_no_syncs, device, lowering))
    yield Check("a whole step in a CUDA graph", partial(_captured, device, lowering))


class _Training:
    """AdamW steps in float16 of one draw's model, whose loss is infinite in some steps."""

    def __init__(self, device: str, scaler: torch.amp.GradScaler, forward: Callable[..., Any] | None = None) -> None:
        torch._dynamo.reset()
        one = draw(0)
        self.model = Net().to(device)
        self.model.load_state_dict(one.weights)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scaler, self.forward = scaler, self._autocast if forward is None else forward(self.model)
        self.batch = one.x.to(device), one.target.to(device)
        self.factor = torch.ones((), device=device)

    def _autocast(self, *batch: Tensor) -> Tensor:
        with torch.autocast(self.factor.device.type, dtype=torch.float16):
            loss: Tensor = self.model(*batch)
        return loss

    def feed(self, step: int) -> None:
        self.factor.fill_(float("inf") if step in BAD else 1.0)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(self.forward(*self.batch) * self.factor).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def scale(self) -> float:
        ours = self.scaler
        return ours.loss_scale if isinstance(ours, fxamp.GradScaler) else ours.get_scale()


def _ours(device: str, lowering: str, skip: str, graph: bool) -> _Training:
    scaler = fxamp.GradScaler(device, skip=skip, **_SETTINGS)
    options: dict[str, Any] = {"policy": f"{device}-float16", "lowering": lowering} | (
        {"scaler": scaler} if graph else {}
    )
    return _Training(device, scaler, lambda model: torch.compile(model, backend="fxamp", options=options))


def _follows_torch(device: str, lowering: str, skip: str, graph: bool) -> str:
    torchs = _Training(device, torch.amp.GradScaler(device, **_SETTINGS))
    ours = _ours(device, lowering, skip, graph)
    for step in range(STEPS):
        before = ours.weights()
        for training in (torchs, ours):
            training.feed(step)
            training.step()
        require(ours.scale() == torchs.scale(), f"step {step}: scale {ours.scale()}, torch's {torchs.scale()}")
        moved = any(not torch.equal(a, b) for a, b in zip(before, ours.weights(), strict=True))
        require(moved == (step not in BAD), f"step {step} {'moved weights' if moved else 'moved nothing'}")
    require(all(bool(weight.isfinite().all()) for weight in ours.weights()), "a weight is not finite")
    return f"{STEPS} steps, {len(BAD)} skipped, scale {ours.scale():g}, all as torch's"


def _no_syncs(device: str, lowering: str) -> str:
    training, counts = _ours(device, lowering, "device", graph=True), []
    for step in range(STEPS):
        training.feed(0)
        loss = training.scaler.scale(training.forward(*training.batch))
        training.optimizer.zero_grad(set_to_none=True)
        with host_syncs(device, training.optimizer) as count:
            loss.backward()
            training.scaler.step(training.optimizer)
            training.scaler.update()
        counts += [count.value] if step >= WARM else []
    require(not any(counts), f"{counts} syncs in steps {WARM} to {STEPS - 1}; accepted: none")
    return f"none in {len(counts)} steps"


def _captured(device: str, lowering: str) -> str:
    if device == "cpu":
        raise SkippedError("CUDA graphs need a CUDA device")
    with _deterministic():
        eager, captured = (_ours(device, lowering, "device", graph=True) for _ in range(2))
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for step in range(WARM):
                captured.feed(step)
                captured.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured.step()
        for step in range(STEPS):
            eager.feed(step)
            eager.step()
            if step >= WARM:
                captured.feed(step)
                graph.replay()
                require(captured.scale() == eager.scale(), f"step {step}: the scale differs from the one without it")
        same = all(torch.equal(a, b) for a, b in zip(eager.weights(), captured.weights(), strict=True))
        require(same, "weights differ from those without it")
        return f"{STEPS - WARM} replays equal the steps without it"


@contextmanager
def _deterministic() -> Iterator[None]:
    """Let equal steps give equal bits: Inductor then measures no kernels to choose one, and cuBLAS keeps workspaces.

    Two trainings that are compiled apart may add up in different orders otherwise.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with patch.dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8"):  # torch asks for it
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
