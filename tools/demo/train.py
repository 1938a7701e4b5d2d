"""One column of the demo: the same model, trained from the same seed on the same batches, by one backend."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch
from torch import Tensor

from fxamp.reports import GraphRecord, registry
from fxamp.scaler import GradScaler
from fxamp.tools.common.interrupt import so_far
from fxamp.tools.common.progress import bar
from fxamp.tools.common.step_memory import StepMemory, lasting_bytes, step_memory
from fxamp.tools.demo.model import GPT
from fxamp.tools.demo.ranks import Ranks
from fxamp.tools.demo.sizes import Size
from fxamp.tools.demo.text import Text
from fxamp.torch_private.parts.dynamo import counters

_ALONE = Ranks()

#: The number of batches of held-out text.
_BATCHES = 4


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of the training, the same in all columns.

    ``rate`` is AdamW's learning rate; ``batch`` counts the passages of one step, those of all processes together.
    """

    size: Size
    batch: int
    steps: int
    rate: float
    device: str
    seed: int


@dataclass(frozen=True)
class TrainingResult:
    """The result of one training.

    ``losses``: nats a token, one a step, before that step's update. ``held_out``: the same on text never trained on,
    after the last step. ``compiling``: seconds of the first step. ``rate``: steps a second, of the median later step.
    ``memory``: of one more step, in this process.
    ``records``: what fxamp did to each graph; empty for float32. ``scale`` and ``skipped``: the loss scale at the end
    and the number of skipped steps, None without a scaler.
    """

    label: str
    losses: tuple[float, ...]
    held_out: float
    graphs: int
    compiling: float
    rate: float
    memory: StepMemory
    records: tuple[GraphRecord, ...] = field(default=())
    scale: float | None = None
    skipped: int | None = None

    @property
    def last(self) -> float:
        """The mean loss of the last ten steps, because single batches differ more than the columns do."""
        return statistics.fmean(self.losses[-10:])


def train(
    label: str,
    settings: TrainingSettings,
    text: Text,
    compiler: Mapping[str, Any],
    stream: TextIO,
    scaler: GradScaler | None = None,
    ranks: Ranks = _ALONE,
    prepare: Callable[[torch.optim.Optimizer], torch.optim.Optimizer] = lambda optimizer: optimizer,
) -> TrainingResult:
    """Train a GPT compiled by ``torch.compile(model, **compiler)`` and report progress on ``stream``.

    ``scaler`` is the one that ``compiler`` gives to the backend, if it does. Losses are those of all ``ranks``.
    ``prepare`` gets AdamW, and returns what steps.
    """
    graphs, records = counters["stats"]["unique_graphs"], registry.count()
    torch.manual_seed(settings.seed)
    model = GPT(settings.size).to(settings.device)
    compiled = torch.compile(ranks.spread(model, settings.device), **compiler)
    optimizer = prepare(torch.optim.AdamW(model.parameters(), lr=settings.rate, fused=True))
    batches = torch.Generator().manual_seed(settings.seed)
    losses: list[float] = []
    seconds: list[float] = []
    with bar(label, settings.steps, "step", stream) as shown, so_far(lambda: stopped(label, losses)):
        for _ in range(settings.steps):
            start = time.perf_counter()
            inputs = _moved(ranks.share(text.batch(settings.batch, settings.size.length, batches)), settings.device)
            loss = compiled(*inputs)
            _finish(loss, optimizer, scaler)
            losses.append(ranks.mean(loss))
            seconds.append(time.perf_counter() - start)
            shown.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
            shown.update()
    held_out = _examine(compiled, settings, text, ranks)
    return TrainingResult(
        label=label,
        losses=tuple(losses),
        held_out=held_out,
        graphs=counters["stats"]["unique_graphs"] - graphs,
        compiling=seconds[0],
        rate=1 / statistics.median(seconds[1:] or seconds),
        memory=step_memory(
            settings.device,
            lambda: compiled(*inputs),
            lambda loss: _finish(loss, optimizer, scaler),
            lambda: lasting_bytes(model, optimizer, inputs),
        ),
        records=tuple(registry.recent(records)),
        scale=scaler.loss_scale if scaler else None,
        skipped=scaler.skipped_steps if scaler else None,
    )


def stopped(label: str, losses: Sequence[float]) -> str:
    """Return what was found before Ctrl-C; "" before the first step."""
    return f"{label}: {len(losses)} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}" if losses else ""


def _finish(loss: Tensor, optimizer: torch.optim.Optimizer, scaler: GradScaler | None) -> None:
    """Make the rest of the step from the loss."""
    if scaler is None:
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    else:
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


def _examine(compiled: Any, settings: TrainingSettings, text: Text, ranks: Ranks) -> float:
    """Return the mean loss on held-out text. Gradients stay enabled to avoid a second compilation."""
    inputs, targets = text.examination(_BATCHES * settings.batch, settings.size.length)
    parts = zip(inputs.chunk(_BATCHES), targets.chunk(_BATCHES), strict=True)
    return statistics.fmean(ranks.mean(compiled(*_moved(ranks.share(part), settings.device))) for part in parts)


def _moved(pair: tuple[Tensor, Tensor], device: str) -> tuple[Tensor, Tensor]:
    return pair[0].to(device), pair[1].to(device)
