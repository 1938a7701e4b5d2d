"""A model is run to learn about it: afterwards its tensors, and those it was called with, are what they were."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


@contextmanager
def restored(*values: Any) -> Iterator[None]:
    """On leaving, every tensor of ``values`` is as it was: its numbers, its gradient, and the name that holds it.

    ``values`` are modules, functions (what they use from outside is taken), tensors, or trees of those. Inside, the
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
    """The modules that ``value``, a module, a function or a tree of those, holds, their submodules too."""
    for leaf in _leaves(value):
        if isinstance(leaf, nn.Module):
            yield from leaf.modules()


def tensors_beside_modules(value: Any) -> list[Tensor]:
    """The tensors that ``value`` holds itself: in a tree, or as what a function uses from outside."""
    return [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor)]


def tensor_stores(module: nn.Module) -> list[dict[str, Any]]:
    """The dicts in which a module keeps tensors: parameters, buffers, plain attributes."""
    return [module._parameters, module._buffers, vars(module)]


def _leaves(value: Any) -> list[Any]:
    if inspect.isfunction(value):
        used = inspect.getclosurevars(value)
        return pytree.tree_leaves([dict(used.nonlocals), dict(used.globals)])
    return pytree.tree_leaves(value)
