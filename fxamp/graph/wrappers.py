"""Tensors that hold other tensors: DTensor and other wrapper subclasses that torch.compile can take apart.

Autocast acts above such a tensor: it casts the DTensor, not the shard inside. So in a captured graph a wrapper is one
value, and an op on it one node; AOTAutograd takes the wrappers apart later. Only the calls that lead in and out of
DTensors, or change their layout, are no ops of ATen: they stay in the graph as they were written, and compute in the
dtype that they are given.
"""

from typing import Any, TypeGuard

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_LAYOUT_CALLS = frozenset({"from_local", "full_tensor", "redistribute", "to_local"})


def is_layout_call(node: Node) -> bool:
    """Whether ``node`` makes a DTensor of a local tensor, or the reverse, or gives a DTensor other placements.

    Dynamo records them as methods and as ``DTensor.from_local``. Where it records functions of other names, the calls
    are kept with their captured dtypes, like everything that fxamp does not know.
    """
    if node.op == "call_method":
        return node.target in _LAYOUT_CALLS
    if node.op != "call_function":
        return False
    module = getattr(node.target, "__module__", None) or ""
    return module.startswith("torch.distributed.tensor") and getattr(node.target, "__name__", "") in _LAYOUT_CALLS


def is_wrapper(value: object) -> TypeGuard[Tensor]:
    """Whether ``value`` is a tensor made of others, by the protocol that torch.compile takes such tensors apart by."""
    return type(value) not in (Tensor, FakeTensor) and is_traceable_wrapper_subclass(value)


def inner_tensors(value: Tensor) -> list[Tensor]:
    """The tensors that hold the data of ``value``: those inside a wrapper, at any depth; a plain tensor itself."""
    if not is_wrapper(value):
        return [value]
    flattened: Any = value
    names, _ = flattened.__tensor_flatten__()
    parts = [getattr(value, name) for name in names]
    return [inner for part in parts if isinstance(part, Tensor) for inner in inner_tensors(part)]


def fake_mode_of(value: Tensor) -> FakeTensorMode | None:
    """The mode of a FakeTensor, or of the FakeTensors inside a wrapper; None if a real tensor is among them."""
    modes = [getattr(inner, "fake_mode", None) for inner in inner_tensors(value)]
    return modes[0] if modes and all(mode is modes[0] for mode in modes) else None
