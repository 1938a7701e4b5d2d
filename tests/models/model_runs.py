"""One training step's loss and gradients of a model: in float64, under eager autocast, and through fxamp."""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree
from zoo import MODELS, Batch, build, build_float64

from fxamp.reports import registry

#: Independent draws of the weights. Rounding errors differ from draw to draw; the models do not, to speak of.
DRAWS = 5

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Run:
    """Loss and gradients of one step, in float64, and the buffers after it."""

    loss: float
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Baseline:
    """A model with its references, by draw: the float64 runs and eager autocast's."""

    name: str
    model: torch.nn.Module
    batch: Batch
    weights: list[Weights]
    true: list[Run]
    autocast: list[Run]


def step(model: torch.nn.Module, batch: Batch, autocast: AbstractContextManager[object] | None = None) -> Run:
    """Forward under ``autocast`` and backward; gradients of earlier steps are dropped first."""
    model.zero_grad(set_to_none=True)
    with autocast or nullcontext():
        loss = model(**batch).loss
    return run_of(model, loss)


def run_of(model: torch.nn.Module, loss: torch.Tensor) -> Run:
    """Run the backward of ``loss`` and take what it leaves in ``model``."""
    loss.backward()
    gradients = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return Run(float(loss.detach()), gradients, {name: b.clone() for name, b in model.named_buffers()})


def same(ours: Run, theirs: Run) -> bool:
    """Whether loss, gradients and buffers are equal bit for bit, and the same parameters have a gradient."""
    if ours.gradients.keys() != theirs.gradients.keys():
        return False
    gradients = all(torch.equal(ours.gradients[name], gradient) for name, gradient in theirs.gradients.items())
    buffers = all(torch.equal(ours.buffers[name], buffer) for name, buffer in theirs.buffers.items())
    return ours.loss == theirs.loss and gradients and buffers


def in_float64(batch: Batch) -> Batch:
    """The batch with its floating-point tensors, at any depth, in float64."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, batch)


def bfloat16_autocast() -> AbstractContextManager[object]:
    """What fxamp is measured by."""
    return torch.autocast("cpu", torch.bfloat16)


def baseline(name: str) -> Baseline:
    """Build model ``name`` and run its references."""
    torch._dynamo.reset()
    model, batch = build(MODELS[name])
    weights = list(draws(model.state_dict()))
    true_model, true_batch = build_float64(MODELS[name]), in_float64(batch)
    true, autocast = [], []
    for drawn in weights:
        true_model.load_state_dict(drawn)
        true.append(step(true_model, true_batch))
        model.load_state_dict(drawn)
        autocast.append(step(model, batch, bfloat16_autocast()))
    model.load_state_dict(weights[0])
    return Baseline(name, model, batch, weights, true, autocast)


def compiled(base: Baseline, lowering: str, count: int = DRAWS) -> list[Run]:
    """The first ``count`` of the same runs through fxamp's cpu-bfloat16."""
    model = copy.deepcopy(base.model)
    model.load_state_dict(base.weights[0])
    since = registry.count()
    model.compile(backend="fxamp", options={"policy": "cpu-bfloat16", "lowering": lowering})
    runs = []
    for drawn in base.weights[:count]:
        model.load_state_dict(drawn)
        runs.append(step(model, base.batch))
    assert sum(record.casts for record in registry.recent(since)) > 0
    return runs


def draws(weights: Weights) -> Iterator[Weights]:
    """The weights as they are, then moved at random by up to one bfloat16 step: every rounding is drawn anew."""
    generator = torch.Generator().manual_seed(1)
    yield {name: value.clone() for name, value in weights.items()}
    for _ in range(DRAWS - 1):
        yield {name: _moved(value, generator) for name, value in weights.items()}


def _moved(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not value.is_floating_point():
        return value.clone()
    uniform = 2 * torch.rand(value.shape, generator=generator) - 1
    return value * (1 + torch.finfo(torch.bfloat16).eps * uniform)
