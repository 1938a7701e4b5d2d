"""Run a model without lasting effects: afterwards its tensors, and its arguments, have their previous values."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxamp.graph import tensor_stores
from fxamp.graph.submodules import submodules


@contextmanager
def restored(*values: Any) -> Iterator[None]:
    """On exit, restore every tensor of ``values``: its numbers, its gradient, and the attribute that holds it.

    ``values`` are modules, functions (including what they use from outside), tensors, or trees of those. Inside, the
    tensors have no gradients.
    """
    stores = [store for value in values for module in modules_in(value) for store in tensor_stores(module)]
    bound = [(store, {name: held for name, held in store.items() if isinstance(held, Tensor)}) for store in stores]
    loose = [tensor for value in values for tensor in tensors_beside_modules(value)]
    held = {id(tensor): tensor for tensor in [*loose, *(t for _, names in bound for t in names.values())]}
    saved = [(tensor, tensor.detach().clone(), tensor.grad if tensor.is_leaf else None) for tensor in held.values()]
    for tensor, _, gradient in saved:
        if gradient is not None:
            tensor.grad = None
    try:
        yield
    finally:
        for store, names in bound:
            store.update(names)
        with torch.no_grad():
            for tensor, numbers, gradient in saved:
                tensor.copy_(numbers)
                if tensor.is_leaf:
                    tensor.grad = gradient


def modules_in(value: Any) -> Iterator[nn.Module]:
    """Yield the modules that ``value`` holds, including submodules; it is a module, a function or a tree of those."""
    for leaf in _leaves(value):
        if isinstance(leaf, nn.Module):
            yield from (module for _, module in submodules(leaf))


def tensors_beside_modules(value: Any) -> list[Tensor]:
    """Return the tensors that ``value`` holds outside modules: in a tree, or used by a function from outside."""
    return [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor)]


def _leaves(value: Any) -> list[Any]:
    if inspect.isfunction(value):
        used = inspect.getclosurevars(value)
        return pytree.tree_leaves([dict(used.nonlocals), dict(used.globals)])
    return pytree.tree_leaves(value)
