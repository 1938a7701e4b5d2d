"""The parts of a module and the names of its tensors, read without calling any code of its class.

Classes override ``named_parameters``, ``named_modules`` and similar methods: with fewer arguments and without some of
the tensors (TorchRL's losses), or with side effects (peft's attention creates a weight again, which must not happen
while it runs). What fxamp reads must not depend on these methods, and reading must not change the module.
"""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn


class ParameterSlot:
    """The parameter that a module has under a name now; it keeps neither alive.

    torch.utils.swap_tensors refuses a tensor with a weak reference, so this refers to the module of the parameter
    instead.
    """

    def __init__(self, module: weakref.ref[nn.Module], name: str) -> None:
        self.module, self._name = module, name

    def __call__(self) -> Tensor | None:
        """Return the parameter; None if there is none, or the module is gone."""
        module = self.module()
        return None if module is None else module._parameters.get(self._name)


def submodules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``root`` and each module below it once, with the first path to it, in the order of ``named_modules``."""
    seen: set[int] = set()
    for path, module in all_paths(root):
        if id(module) not in seen:
            seen.add(id(module))
            yield path, module


def all_paths(root: nn.Module, path: str = "", above: tuple[int, ...] = ()) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``root`` and each module below it, once for every path to it; a module inside itself ends its path."""
    yield path, root
    above = (*above, id(root))
    for name, module in root._modules.items():
        if module is not None and id(module) not in above:
            yield from all_paths(module, f"{path}.{name}" if path else name, above)


def named_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter below ``root``, once for every name that it has."""
    return _named(root, "_parameters")


def named_buffers(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each buffer below ``root``, once for every name that it has."""
    return _named(root, "_buffers")


def _named(root: nn.Module, store: str) -> Iterator[tuple[str, Any]]:
    for path, module in all_paths(root):
        for name, value in getattr(module, store).items():
            if value is not None:
                yield f"{path}.{name}" if path else name, value


def first_names(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return each tensor of ``named`` by its first name."""
    first: dict[int, tuple[str, Tensor]] = {}
    for name, value in named:
        first.setdefault(id(value), (name, value))
    return dict(first.values())
