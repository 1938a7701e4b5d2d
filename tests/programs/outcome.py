"""What a call of a program did: results, gradients, writes, and which results share memory."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from programs.program import Setting
from programs.render import larger
from programs.tensors import flat
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

    ``afresh`` makes the run again as a new process would; None where nothing is compiled. ``evaluates`` runs it outside
    of the ambient autocast; None where there is none. ``compile_optimizer`` compiles the step of one in place.
    """

    call: Callable[..., Sequence[Tensor]]
    module: nn.Module
    inputs: Sequence[Tensor]
    scaler: torch.amp.GradScaler | None = None
    afresh: Callable[[], "Run"] | None = None
    evaluates: Callable[..., Sequence[Tensor]] | None = None
    compile_optimizer: Callable[[torch.optim.Optimizer], object] | None = None


def observe(run: Run, setting: Setting) -> Outcome:
    """Call and go backward as often as the setting says."""
    batches = [run.inputs]
    if setting.schedule in ("again", "together", "larger"):
        batches.append(larger(run.inputs) if setting.schedule == "larger" else run.inputs)
    copies: list[Tensor] = []
    losses: list[Tensor] = []
    written: set[str] = set()
    for inputs in batches:
        named = named_tensors(run.module, inputs)
        versions = leaf_versions(named)
        results = list(run.call(*inputs))
        copies += [result.detach().clone() for result in results]
        written |= {name for name, version in versions.items() if named[name]._version != version}
        losses += terms(results, named, setting)
        if setting.schedule == "apart":
            for loss in losses:
                backward([loss], run.scaler, retain_graph=True)
            losses.clear()
        if setting.schedule == "twice":
            losses = _penalty(losses, [named[name] for name in versions])
        if setting.schedule not in ("together", "forward"):
            backward(losses, run.scaler)
            losses.clear()
    if setting.schedule != "forward":
        backward(losses, run.scaler)
    if setting.schedule == "evaluated":
        with torch.no_grad():
            evaluates = run.call if run.evaluates is None else run.evaluates
            copies += [result.clone() for result in evaluates(*run.inputs)]
    step = None if run.scaler is None else _step(run.scaler, run.module)
    return outcome(named, results, copies, step, frozenset(written))


def _penalty(losses: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """The losses and the squares of their gradients."""
    if not losses or not leaves:
        return list(losses)
    gradients = torch.autograd.grad(losses, leaves, create_graph=True, allow_unused=True)
    some = [flat(gradient) for gradient in gradients if gradient is not None and gradient.grad_fn is not None]
    return [*losses, *(gradient.float().square().sum() for gradient in some)]


def outcome(
    named: dict[str, Tensor],
    results: Sequence[Tensor],
    copies: Sequence[Tensor],
    scale: float | None,
    written: frozenset[str] = frozenset(),
) -> Outcome:
    """What is left after all: ``copies`` are those of all results, ``results`` those of the last call."""
    gradients = {name: None if t.grad is None else t.grad.clone() for name, t in named.items() if t.is_leaf}
    state = {name: tensor.detach().clone() for name, tensor in named.items()}
    everything = {f"result {i}": result for i, result in enumerate(results)} | named
    return Outcome(tuple(copies), gradients, state, scale, _same(everything), _shared(everything), written)


def leaf_versions(named: dict[str, Tensor]) -> dict[str, int]:
    """How often each leaf that needs a gradient was written to."""
    return {name: tensor._version for name, tensor in named.items() if tensor.is_leaf and tensor.requires_grad}


def backward(losses: Sequence[Tensor], scaler: torch.amp.GradScaler | None, retain_graph: bool = False) -> None:
    """Go backward from the sum of ``losses``, if there are any."""
    if losses:
        total = torch.stack([loss.double() for loss in losses]).sum() if len(losses) > 1 else losses[0]
        (total if scaler is None else scaler.scale(total)).backward(retain_graph=retain_graph)


def _step(scaler: torch.amp.GradScaler, module: nn.Module) -> float | None:
    """One step of an optimizer; the scale that it leaves, or None where no parameter has a gradient."""
    parameters = [parameter for parameter in module.parameters() if parameter.grad is not None]
    if not parameters:
        return None
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return scale_of(scaler)


def scale_of(scaler: torch.amp.GradScaler) -> float:
    """The loss scale."""
    return float(getattr(scaler, "loss_scale", None) or scaler.get_scale())


def named_tensors(module: nn.Module, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Parameters, buffers and inputs by name."""
    named: dict[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
    return named | {f"x{i}": tensor for i, tensor in enumerate(inputs)}


def terms(results: Sequence[Tensor], named: dict[str, Tensor], setting: Setting) -> list[Tensor]:
    """The loss: a term for each result that is used if these go backward apart, else their sum; none without any.

    A term is a sum of squares, in float32 at least, of one result of those that overlap in memory. A view that was made
    under no_grad says that it requires a gradient, but nothing flows through it: it has no term.

    Where results overlap, autocast sums their gradients in 16 bits and a compiled graph in the wider dtype that it
    hands out; where they are inputs, their gradient comes first or last in a sum of float32. One is enough to see what
    flows back, but none that an expansion repeats: its own gradient is such a sum.
    """
    taken = {element for tensor in named.values() for element in _elements(tensor)}
    held = Counter(chain.from_iterable(map(_elements, {id(result): result for result in results}.values())))
    tensors: list[Tensor] = []
    for at, result in enumerate(results):
        elements = _elements(result)
        if result.grad_fn is None or not setting.uses(at) or not elements.isdisjoint(taken):
            continue
        if any(held[element] > 1 for element in elements) and _without_repeats(result) is not result:
            continue
        taken |= elements
        real = flat(result)
        tensors.append((real.to(torch.promote_types(real.dtype, torch.float32)).square() * (at + 1)).sum())
    if setting.zeros:
        tensors = _with_zeros(tensors, results, setting)
    if setting.schedule != "apart" and tensors:
        total = tensors[0]
        for term in tensors[1:]:
            total = total + term.to(total.dtype)
        tensors = [total]
    return [term * setting.factor for term in tensors]


def _with_zeros(tensors: list[Tensor], results: Sequence[Tensor], setting: Setting) -> list[Tensor]:
    """Terms and, for each backward, terms that give zeros to the results that it does not go back from.

    Where terms go backward apart, those are the other results at least.
    """
    apart = setting.schedule == "apart"
    idle = [r for at, r in enumerate(results) if r.grad_fn is not None and (apart or not setting.uses(at))]
    zeros = [(real.to(torch.promote_types(real.dtype, torch.float32)) * 0).sum() for real in map(flat, idle)]
    return [sum(zeros, term) for term in tensors] if apart else [*tensors, *zeros]


def _elements(tensor: Tensor) -> frozenset[tuple[int, int]]:
    """The elements of the tensor: their storage, and the first byte of each in it."""
    if tensor.is_sparse:
        return frozenset({(id(tensor), 0)})
    storage = tensor.untyped_storage()
    places = torch.arange(storage.nbytes() // tensor.itemsize)
    own = places.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).unique() * tensor.itemsize
    return frozenset((storage._cdata, place) for place in own.tolist())


def _same(tensors: dict[str, Tensor]) -> frozenset[tuple[str, str]]:
    return frozenset((a, b) for a in tensors for b in tensors if a < b and tensors[a] is tensors[b])


def _shared(tensors: dict[str, Any]) -> frozenset[tuple[str, str]]:
    """Pairs by trial: fill one with a number and see what changes."""
    pairs = set()
    with torch.no_grad():
        raw = {name: _without_repeats(tensor.detach()) for name, tensor in tensors.items() if not tensor.is_sparse}
        for name, tensor in raw.items():
            before = {other: t.clone() for other, t in raw.items()}
            tensor.fill_(77)
            pairs |= {(name, other) for other, t in raw.items() if other != name and _changed(before[other], t)}
            for other, t in raw.items():
                t.copy_(before[other])
    return frozenset(pairs)


def _without_repeats(tensor: Tensor) -> Tensor:
    """One element for those that an expansion repeats: torch writes to no expanded tensor."""
    for dim, stride in enumerate(tensor.stride()):
        tensor = tensor.narrow(dim, 0, 1) if stride == 0 and tensor.shape[dim] > 1 else tensor
    return tensor


def _changed(before: Tensor, now: Tensor) -> bool:
    return not torch.equal(flat(before).nan_to_num(), flat(now).nan_to_num())
