"""One run of a model, forward and backward: its outputs and gradients in float64, on the CPU.

The backward starts at the scalar outputs, which are losses, if there are any. Otherwise it starts at every
floating-point output, with normal random numbers that are the same in all runs; a sum, for example of a softmax, could
hide an error.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxamp.tools.inputs.model_file import Program

_SEED = 0


@dataclass(frozen=True)
class Measured:
    """Floating-point outputs in order, and gradients by the names of their tensors; all float64, on the CPU."""

    outputs: tuple[Tensor, ...]
    gradients: Mapping[str, Tensor]

    @property
    def finite(self) -> bool:
        """Whether all gradients are finite."""
        return all(bool(gradient.isfinite().all()) for gradient in self.gradients.values())


def moved(program: Program, device: str, dtype: torch.dtype | None = None) -> Program:
    """Return a copy of the program on ``device``, with floating-point tensors in ``dtype`` if it is given."""

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        there = value.detach().to(device, dtype if value.is_floating_point() else None, copy=True)
        return there.requires_grad_(value.requires_grad)

    model = copy.deepcopy(program.model)
    if isinstance(model, torch.nn.Module):
        model.to(device, dtype).zero_grad()
    args, kwargs = pytree.tree_map(move, (program.args, dict(program.kwargs)))
    return Program(model, args, kwargs)


def run(program: Program, call: Callable[..., Any], scaled: Callable[[Tensor], Tensor], seed: int = _SEED) -> Measured:
    """Run ``call``, which computes the program's model, and its backward; ``scaled`` is applied to its start values."""
    torch.manual_seed(seed)
    leaves = _leaves(program)
    for leaf in leaves.values():
        leaf.grad = None
    found = call(*program.args, **program.kwargs)
    outputs = [value for value in pytree.tree_leaves(found) if isinstance(value, Tensor) and value.is_floating_point()]
    start = [value for value in outputs if value.requires_grad]
    start = [value for value in start if value.dim() == 0] or start
    if start:
        torch.autograd.backward([scaled(value) for value in start], [_cotangent(value) for value in start])
    gradients = {name: _exact(leaf.grad) for name, leaf in leaves.items() if leaf.grad is not None}
    return Measured(tuple(map(_exact, outputs)), gradients)


def _leaves(program: Program) -> dict[str, Tensor]:
    """Return the tensors whose gradients are compared: the model's parameters, and inputs that require a gradient."""
    model = program.model
    named = dict(model.named_parameters()) if isinstance(model, torch.nn.Module) else {}
    inputs = pytree.tree_leaves((program.args, dict(program.kwargs)))
    asked = {f"input {at}": value for at, value in enumerate(inputs) if isinstance(value, Tensor)}
    return {name: value for name, value in (named | asked).items() if value.requires_grad}


def _cotangent(value: Tensor) -> Tensor:
    if value.dim() == 0:
        return torch.ones_like(value)
    generator = torch.Generator().manual_seed(_SEED)
    numbers = torch.randn(value.shape, generator=generator, dtype=torch.float64)
    return numbers.to(value.device, value.dtype)


def _exact(value: Tensor) -> Tensor:
    return value.detach().to("cpu", torch.float64)
