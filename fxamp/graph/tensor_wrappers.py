"""Tensors that hold other tensors: DTensor, and other wrapper subclasses that torch.compile can flatten.

Autocast acts on the wrapper: it casts the DTensor, not the shard inside. So in a captured graph a wrapper is one value,
and an op on it one node; AOTAutograd flattens the wrappers later. Only the calls that create or unwrap DTensors, or
change their layout, are not ATen ops: they stay in the graph verbatim, and compute in the dtype of their input. So
does ``Tensor.data``.
"""

from typing import Any, TypeGuard

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fxamp.torch_private.parts.fx import is_traceable_wrapper_subclass

_LAYOUT_CALLS = frozenset({"from_local", "full_tensor", "redistribute", "to_local"})

#: Dynamo's name for a read of ``Tensor.data``.
_DATA = "_get_data_attr"


def is_data(node: Node) -> bool:
    """Whether ``node`` reads ``Tensor.data``: the same memory, outside autograd and with a version counter of its own.

    If Dynamo records it under another name, it is kept with its captured dtypes, like everything that fxamp does not
    know.
    """
    return node.op == "call_function" and getattr(node.target, "__name__", "") == _DATA


def follows_input(node: Node) -> bool:
    """Whether ``node`` is not an ATen op, and returns its input in that input's dtype.

    It reads ``Tensor.data``, creates a DTensor from a local tensor or the reverse, or changes a DTensor's placements.
    Dynamo records the latter as methods and as ``DTensor.from_local``; torch 2.11's Dynamo records functions that call
    them, ``prim_to_local`` and ``prim from_local``. If Dynamo records functions of other names, the calls keep their
    captured dtypes, like everything that fxamp does not know.
    """
    if is_data(node):
        return True
    if node.op == "call_method":
        return node.target in _LAYOUT_CALLS
    if node.op != "call_function":
        return False
    module, name = getattr(node.target, "__module__", None) or "", getattr(node.target, "__name__", "")
    if module.startswith("torch._dynamo.variables."):
        return name.startswith("prim") and name[len("prim_") :] in _LAYOUT_CALLS
    return module.startswith("torch.distributed.tensor") and name in _LAYOUT_CALLS


def is_wrapper(value: object) -> TypeGuard[Tensor]:
    """Whether ``value`` is a tensor made of others, by the protocol with which torch.compile flattens such tensors."""
    return type(value) not in (Tensor, FakeTensor) and is_traceable_wrapper_subclass(value)


def inner_tensors(value: Tensor) -> list[Tensor]:
    """Return the tensors that hold the data of ``value``: those inside a wrapper, at any depth; else itself."""
    if not is_wrapper(value):
        return [value]
    flattened: Any = value
    names, _ = flattened.__tensor_flatten__()
    parts = [getattr(value, name) for name in names]
    return [inner for part in parts if isinstance(part, Tensor) for inner in inner_tensors(part)]


def mode_of(gm: GraphModule) -> FakeTensorMode | None:
    """Return the mode of the first FakeTensor among the values of ``gm``; None if it has none."""
    leaves = (leaf for node in gm.graph.nodes for leaf in pytree.tree_leaves(node.meta.get("val")))
    return next((fake_mode_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)), None)


def fake_mode_of(value: Tensor) -> FakeTensorMode | None:
    """Return the mode of a FakeTensor, or of the FakeTensors inside a wrapper; None if it holds a real tensor."""
    modes = [getattr(inner, "fake_mode", None) for inner in inner_tensors(value)]
    return modes[0] if modes and all(mode is modes[0] for mode in modes) else None
