"""Operands that hold whole numbers, such as positions: bfloat16 represents those up to 256, float16 up to 2048."""

import torch
from torch._ops import OpOverload
from torch.fx import Node

from fxamp.graph import base_name, floating_inputs, is_float_tensor, tensor_value
from fxamp.graph.aliases import is_view
from fxamp.passes.shared.sites import MOVES

#: Integer dtypes with numbers that 16-bit floats do not represent.
_WIDE = (torch.int16, torch.int32, torch.int64)
_COUNTS = ("aten::arange", "aten::range")
#: Ops with results of 0 and 1, which any dtype represents.
_MARKS = ("aten::one_hot", "aten::scatter", "aten::zeros", "aten::zeros_like", "aten::ones", "aten::ones_like")
_JOINS = ("aten::cat", "aten::stack")
#: Ops besides moves and views whose results consist of elements of their first operand, or of all that they join.
_PICKS = (*_JOINS, "aten::repeat", "aten::tile", "aten::index", "aten::index_select", "aten::gather")


def rounded_numbers(call: Node, lower: torch.dtype) -> str:
    """Return why ``call`` should not run in ``lower``, "" if no operand consists of whole numbers.

    Such an operand has the elements of an integer tensor, or of ``arange``. Those of 8-bit integers, of bools and of
    ``one_hot`` do not count, because 16-bit floats represent them.
    """
    whole = next((operand for operand in floating_inputs(call) if _is_whole(operand)), None)
    most = int(2 / torch.finfo(lower).eps)
    return "" if whole is None else f"{whole.name} holds whole numbers, which {lower} rounds from {most + 1} on"


def _is_whole(value: Node) -> bool:
    """Whether the elements of ``value`` are whole numbers: those of a wide integer tensor that are more than marks."""
    tensor = tensor_value(value)
    wide = tensor is not None and tensor.dtype in _WIDE
    if not isinstance(value.target, OpOverload):
        return wide
    name = base_name(value)
    if name in _MARKS or not (wide or is_float_tensor(value)):
        return False
    if name in MOVES or name in _PICKS or is_view(value):
        sources = value.all_input_nodes if name in _JOINS else value.all_input_nodes[:1]
        return any(_is_whole(source) for source in sources)
    return name in _COUNTS or wide
