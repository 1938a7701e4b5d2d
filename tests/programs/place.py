"""Where a statement stands, and what runs it while the program is drawn."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from programs.program import Declaration
from programs.render import PRELUDE
from torch import Tensor, nn


@dataclass(frozen=True)
class Place:
    """Where in the program a statement stands.

    In an autocast region of the program's own (``region``) ``lower`` is its dtype, None where it is off; ``cached``:
    whether autocast casts a leaf once there. ``grad``: whether gradients are on; ``inference``: whether it is a block
    of torch.inference_mode. ``body`` names the function around it, ``outer`` the values in sight there that were made
    outside of it.
    """

    region: bool = False
    lower: torch.dtype | None = None
    cached: bool = True
    grad: bool = True
    inference: bool = False
    body: str = ""
    outer: frozenset[str] = frozenset()
    depth: int = 0


class Side:
    """The program so far, run under an autocast to ``lower``, or without one."""

    def __init__(self, lower: torch.dtype | None) -> None:
        self._lower = lower
        self._self = SimpleNamespace()
        self._names: dict[str, Any] = {}
        exec(PRELUDE, self._names)
        self._names["self"] = self._self
        self._definitions: set[str] = set()

    def run(self, code: str, place: Place) -> None:
        """Execute ``code``; whatever it raises is passed on."""
        lower = place.lower if place.region else self._lower
        with (
            torch.autocast("cpu", lower or torch.bfloat16, enabled=lower is not None),
            torch.set_grad_enabled(place.grad),
        ):
            exec(code, self._names)

    def declare(self, declaration: Declaration) -> None:
        """Make the module, or the tensor, filled with numbers."""
        if declaration.role == "module":
            setattr(self._self, declaration.name, eval(declaration.made, self._names))
            return
        if declaration.role == "input":
            self._names[declaration.name] = _filled(declaration).requires_grad_(declaration.grad)
        elif declaration.tied is not None:
            setattr(self._self, declaration.name, getattr(self._self, declaration.tied))
        else:
            filled = _filled(declaration)
            parameter = declaration.role == "parameter"
            setattr(self._self, declaration.name, nn.Parameter(filled, declaration.grad) if parameter else filled)

    def define(self, name: str, source: str) -> None:
        """Execute the definition of a class, which is never out of sight."""
        exec(source, self._names)
        self._definitions.add(name)

    def differentiate(self, names: Sequence[str]) -> None:
        """Go backward from values as a program's caller does; whatever that raises is passed on."""
        outputs = [value for name, value in self.values().items() if name in names and value.grad_fn is not None]
        tensors = [value for value in (*self._names.values(), *vars(self._self).values()) if isinstance(value, Tensor)]
        leaves = [tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad]
        if outputs and leaves:
            ones = [torch.ones_like(output) for output in outputs]
            torch.autograd.grad(outputs, leaves, ones, retain_graph=True, allow_unused=True)

    def values(self) -> dict[str, Tensor]:
        return {name: value for name, value in self._names.items() if isinstance(value, Tensor)}

    def names(self) -> dict[str, Any]:
        """The values in sight, by name."""
        return dict(self._names)

    def go_back_to(self, names: dict[str, Any]) -> None:
        """See these values again, and besides them only what is defined since."""
        self._names = names | {name: self._names[name] for name in self._definitions}


def _filled(declaration: Declaration) -> Tensor:
    generator = torch.Generator().manual_seed(sum(declaration.shape))
    if declaration.dtype.is_complex:
        return torch.randn(declaration.shape, generator=generator, dtype=declaration.dtype).div(2)
    if not declaration.dtype.is_floating_point:
        return torch.randint(2, declaration.shape, generator=generator).to(declaration.dtype)
    shape = declaration.shape[::-1] if declaration.reversed_strides else declaration.shape
    filled = torch.randn(shape, generator=generator).div(2).to(declaration.dtype)
    return filled.permute(tuple(reversed(range(len(shape))))) if declaration.reversed_strides else filled
