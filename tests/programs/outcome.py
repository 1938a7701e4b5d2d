"""What a call of a program did: results, gradients, writes, and which results share memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Outcome:
    """All tensors are copies. ``gradients`` holds None where a parameter or an input has none.

    ``state`` holds parameters, buffers and inputs after the call. ``same`` are pairs of results, inputs and state that
    are one object, ``shared`` those of which one shows what is written to the other.
    """

    results: tuple[Tensor, ...]
    gradients: dict[str, Tensor | None]
    state: dict[str, Tensor]
    same: frozenset[tuple[str, str]]
    shared: frozenset[tuple[str, str]]


def observe(call: Callable[..., Sequence[Tensor]], module: nn.Module, inputs: Sequence[Tensor]) -> Outcome:
    """Call once and go backward from all results; ``call`` runs ``module``, which owns the parameters."""
    torch.manual_seed(7)
    results = list(call(*inputs))
    kept = tuple(result.detach().clone() for result in results)
    named = _named(module, inputs)
    total = _loss(results, {_memory(tensor) for tensor in named.values()})
    if total is not None:
        total.backward()
    gradients = {name: None if t.grad is None else t.grad.clone() for name, t in named.items() if t.is_leaf}
    state = {name: tensor.detach().clone() for name, tensor in named.items()}
    everything = {f"result {i}": result for i, result in enumerate(results)} | named
    return Outcome(kept, gradients, state, _same(everything), _shared(everything))


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
