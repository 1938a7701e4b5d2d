"""Operands that hold whole numbers, such as positions: bfloat16 represents those up to 256, float16 up to 2048."""

import torch
from torch._ops import OpOverload
from torch.fx import Node

from fxamp.graph import base_name, dtype_of, floating_inputs, is_float_tensor
from fxamp.graph.aliases import is_view
from fxamp.passes.shared.accepted_dtypes import reads_bits
from fxamp.passes.shared.sites import MOVES

#: Integer dtypes with numbers that 16-bit floats do not represent.
_WIDE = (torch.int16, torch.int32, torch.int64)
_COUNTS = ("aten::arange", "aten::range")
#: Ops with results of 0 and 1, which any dtype represents.
_ZEROS_AND_ONES = ("aten::one_hot", "aten::scatter", "aten::zeros", "aten::zeros_like", "aten::ones", "aten::ones_like")
_JOINS = ("aten::cat", "aten::stack")
#: Ops besides moves and views whose results consist of elements of their first operand, or of all that they join.
_PICKS = (*_JOINS, "aten::repeat", "aten::tile", "aten::index", "aten::index_select", "aten::gather")


def rounded_numbers(call: Node, lower: torch.dtype) -> str:
    """Return why ``call`` should not run in ``lower``, "" if no operand consists of whole numbers.

    Such an operand has the elements of an integer tensor, or of ``arange``. Those of 8-bit integers, of bools and of
    ``one_hot`` do not count, because 16-bit floats represent them; nor do floats made of an integer tensor's bits.
    """
    whole = next((operand for operand in floating_inputs(call) if _is_whole(operand)), None)
    most = int(2 / torch.finfo(lower).eps)
    return "" if whole is None else f"{whole.name} holds whole numbers, which {lower} rounds from {most + 1} on"


def _is_whole(value: Node) -> bool:
    """Whether elements of ``value`` are whole numbers: those of a wide integer tensor, but not 0 and 1 alone."""
    waiting, seen = [value], set[Node]()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        name = base_name(node) if isinstance(node.target, OpOverload) else ""
        if not reads_bits(node) and (name in MOVES or name in _PICKS or is_view(node)):
            if is_float_tensor(node) or dtype_of(node) in _WIDE:
                waiting += node.all_input_nodes if name in _JOINS else node.all_input_nodes[:1]
        elif name in _COUNTS or (dtype_of(node) in _WIDE and name not in _ZEROS_AND_ONES):
            return True
    return False
