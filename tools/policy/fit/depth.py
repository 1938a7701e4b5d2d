"""A model with few of its layers: two depths are enough to extrapolate what a step of the whole model costs."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import nn

#: How many layers of each kind the two counted models have.
DEPTHS = (2, 4)


def depth_of(model: Any) -> int:
    """Return how many layers of each kind ``model`` has, 0 if its kinds differ or there are no more than counted.

    Layers of one kind lie in one ``nn.ModuleList`` or ``nn.Sequential`` and have the same classes and shapes.
    """
    depths = {len(names) for _, names in _kinds(model)} if isinstance(model, nn.Module) else set()
    return next(iter(depths)) if len(depths) == 1 and min(depths) > DEPTHS[-1] else 0


def cut(model: Any, depth: int) -> Any:
    """Leave ``depth`` layers of each kind in ``model``, the last one among them, and return it; 0 leaves all."""
    kinds = [*_kinds(model)] if depth else []
    for container, names in kinds:
        for name in names[depth - 1 : -1]:
            del container._modules[name]
    for container in dict.fromkeys(container for container, _ in kinds):
        layers = [*container._modules.values()]
        container._modules.clear()
        container._modules.update({str(at): layer for at, layer in enumerate(layers)})
    return model


def _kinds(model: nn.Module) -> Iterator[tuple[nn.Module, list[str]]]:
    """Yield each outermost list of layers with the names of those that are of one kind, two or more, in order."""
    for child in model.children():
        kinds: dict[object, list[str]] = defaultdict(list)
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            for name, layer in child.named_children():
                if any(True for _ in layer.parameters()):
                    kinds[_signature(layer)].append(name)
        repeated = [names for names in kinds.values() if len(names) > 1]
        if repeated:
            yield from ((child, names) for names in repeated)
        else:
            yield from _kinds(child)


def _signature(layer: nn.Module) -> object:
    classes = tuple(type(module) for module in layer.modules())
    return classes, tuple((name, tuple(value.shape)) for name, value in layer.named_parameters())
