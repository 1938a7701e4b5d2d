"""What a call of a program did: results, gradients, writes, and which results share memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from programs.program import Setting
from programs.render import larger
from torch import Tensor, nn


@dataclass(frozen=True)
class Outcome:
    """All tensors are copies. ``gradients`` holds None where a parameter or an input has none.

    ``state`` holds parameters, buffers and inputs after all, ``scale`` is the scaler's. ``same`` are pairs of results,
    inputs and state that are one object, ``shared`` those of which one shows what is written to the other. ``written``
    are the leaves that need a gradient and were written to.
    """

    results: tuple[Tensor, ...]
    gradients: dict[str, Tensor | None]
    state: dict[str, Tensor]
    scale: float | None
    same: frozenset[tuple[str, str]]
    shared: frozenset[tuple[str, str]]
    written: frozenset[str]


@dataclass(frozen=True)
class Run:
    """One way to run a program: ``call`` runs ``module``, which owns the parameters. ``scaler`` scales the loss.

    ``evaluates`` runs it outside of the ambient autocast; ``call``, if there is none.
    """

    call: Callable[..., Sequence[Tensor]]
    module: nn.Module
    inputs: Sequence[Tensor]
    scaler: torch.amp.GradScaler | None = None
    evaluates: Callable[..., Sequence[Tensor]] | None = None


def observe(run: Run, setting: Setting) -> Outcome:
    """Call and go backward as often as the setting says."""
    torch.manual_seed(7)
    batches = [run.inputs]
    if setting.schedule not in ("once", "forward", "evaluated"):
        batches.append(larger(run.inputs) if setting.schedule == "larger" else run.inputs)
    kept: list[Tensor] = []
    losses: list[Tensor] = []
    written: set[str] = set()
    for inputs in batches:
        named = _named(run.module, inputs)
        versions = {name: tensor._version for name, tensor in named.items() if tensor.is_leaf and tensor.requires_grad}
        results = list(run.call(*inputs))
        kept += [result.detach().clone() for result in results]
        written |= {name for name, version in versions.items() if named[name]._version != version}
        loss = _loss(results, {_memory(tensor) for tensor in named.values()})
        losses += [] if loss is None else [loss * setting.factor]
        if setting.schedule not in ("together", "forward"):
            _backward(losses, run.scaler)
    if setting.schedule != "forward":
        _backward(losses, run.scaler)
    if setting.schedule == "evaluated":
        with torch.no_grad():
            evaluates = run.call if run.evaluates is None else run.evaluates
            kept += [result.clone() for result in evaluates(*run.inputs)]
    step = None if run.scaler is None else _step(run.scaler, run.module)
    gradients = {name: None if t.grad is None else t.grad.clone() for name, t in named.items() if t.is_leaf}
    state = {name: tensor.detach().clone() for name, tensor in named.items()}
    everything = {f"result {i}": result for i, result in enumerate(results)} | named
    return Outcome(tuple(kept), gradients, state, step, _same(everything), _shared(everything), frozenset(written))


def _backward(losses: list[Tensor], scaler: torch.amp.GradScaler | None) -> None:
    if losses:
        total = torch.stack([loss.double() for loss in losses]).sum() if len(losses) > 1 else losses[0]
        (total if scaler is None else scaler.scale(total)).backward()
        losses.clear()


def _step(scaler: torch.amp.GradScaler, module: nn.Module) -> float | None:
    """One step of an optimizer; the scale that it leaves, or None where no parameter has a gradient."""
    parameters = [parameter for parameter in module.parameters() if parameter.grad is not None]
    if not parameters:
        return None
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return float(getattr(scaler, "loss_scale", None) or scaler.get_scale())


def _named(module: nn.Module, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    named: dict[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
    return named | {f"x{i}": tensor for i, tensor in enumerate(inputs)}


def _loss(results: Sequence[Tensor], seen: set[int]) -> Tensor | None:
    """A sum of squares, in float32 at least, of one result for each piece of memory that is not in ``seen``.

    Where results share memory, autocast sums their gradients in 16 bits and a compiled graph in the wider dtype that it
    hands out; where they are inputs, their gradient comes first or last in a sum of float32. One is enough to see what
    flows back.
    """
    total = None
    for weight, result in enumerate(results, 1):
        if not result.requires_grad or _memory(result) in seen:
            continue
        seen = seen | {_memory(result)}
        wide = result.to(torch.promote_types(result.dtype, torch.float32))
        term = (wide.square() * weight).sum()
        total = term if total is None else total + term.to(total.dtype)
    return total


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _same(tensors: dict[str, Tensor]) -> frozenset[tuple[str, str]]:
    return frozenset((a, b) for a in tensors for b in tensors if a < b and tensors[a] is tensors[b])


def _shared(tensors: dict[str, Any]) -> frozenset[tuple[str, str]]:
    """Pairs by trial: fill one with a number and see what changes."""
    pairs = set()
    with torch.no_grad():
        raw = {name: tensor.detach() for name, tensor in tensors.items()}
        for name, tensor in raw.items():
            before = {other: t.clone() for other, t in raw.items()}
            tensor.fill_(77)
            pairs |= {(name, other) for other, t in raw.items() if other != name and _changed(before[other], t)}
            for other, t in raw.items():
                t.copy_(before[other])
    return frozenset(pairs)


def _changed(before: Tensor, now: Tensor) -> bool:
    return not torch.equal(before.nan_to_num(), now.nan_to_num())
