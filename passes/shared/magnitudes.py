"""Measure values of a graph: the largest magnitude of each as one number, which is inf or NaN if the value is.

One number says whether a value is finite, whether it holds a NaN, and, in earlier runs, how far it was from its dtype's
limit. It is a reduction over the value alone, so that a compiler can compute it in the loop that computes or reads the
value.

Values without information of their own are not measured: views, copies, parts and concatenations of measured values;
tensors made of finite numbers alone; and results whose largest magnitude follows from that of their inputs:
conversions, and the ops of :func:`largest_after`.
"""

import math
import operator
from collections.abc import Callable, Collection
from functools import partial

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node
from torch.utils import _pytree as pytree

from fxamp.graph import base_name, dtype_of, floating_inputs, has_strides, tensor_value
from fxamp.policy.model.op_names import aten_ops

aten = torch.ops.aten

#: Key of the output node's ``meta``: the names of the measured nodes, in the order of the numbers in the last output.
MEASURED = "fxamp_measured"

#: Key of ``node.meta["custom"]``: the name of the forward's node that a traced node was made for.
OP = "fxamp_op"

#: Ops whose results hold the elements of their inputs and no others.
WHOLE = aten_ops("""
    _conj _reshape_alias _unsafe_view alias atleast_1d atleast_2d atleast_3d broadcast_to clone contiguous detach expand
    expand_as flatten lift_fresh_copy movedim moveaxis permute ravel repeat reshape reshape_as squeeze swapaxes swapdims
    t tile transpose unflatten unsqueeze view view_as abs neg cat concat stack flip roll hstack vstack _conj_physical
    positive copy numpy_T fliplr flipud msort rot90
""")

#: Ops whose results hold some of the elements of their inputs, and otherwise only zeros.
PARTS = aten_ops("""
    slice select split split_with_sizes chunk unbind narrow index_select embedding as_strided diagonal unfold
    tensor_split unsafe_split unsafe_chunk relu tril triu unsafe_split_with_sizes index gather slice_backward
    select_backward diag_embed pixel_shuffle pixel_unshuffle hsplit vsplit dsplit take take_along_dim masked_select
    repeat_interleave
""")

_CONVERSIONS = frozenset(
    {"aten::to", "aten::_to_copy", "aten::type_as", "aten::float", "prims::convert_element_type", "prims::device_put"}
)


def is_measured(node: Node, known: Collection[Node]) -> bool:
    """Whether to measure the value of ``node``: a floating tensor whose magnitude does not follow from others.

    ``known``: the nodes before it whose largest magnitudes are measured, or follow from measured ones.
    """
    if not can_be_measured(node):
        return False
    if node.op in ("placeholder", "get_attr"):
        return True
    if node.op != "call_function" or passes_on(node) or is_made_of_numbers(node):
        return False
    return largest_after(node) is None or node.args[0] not in known


def is_known(node: Node, known: Collection[Node]) -> bool:
    """Whether the largest magnitude of a result follows from those that are ``known``."""
    follows = passes_on(node) or largest_after(node) is not None
    return follows and all(source in known for source in floating_inputs(node))


def can_be_measured(node: Node) -> bool:
    """Whether the value of ``node`` is a plain tensor of 16 bits or more that has elements."""
    value = tensor_value(node)
    if value is None or not value.is_floating_point() or not has_strides(value) or value.dtype.itemsize < 2:
        return False
    return not any(type(size) is int and size == 0 for size in value.shape)


def passes_on(node: Node) -> bool:
    """Whether the result of ``node`` holds no other elements than its inputs, but zeros and ones."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, Node) and (passes_on(source) or tensor_value(source) is not None)
    if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
        return False
    name = base_name(node)
    if is_conversion(node):  # whether it overflows follows from its input's largest magnitude, if that is known
        before, after = tensor_value(node.args[0]), tensor_value(node)
        if before is None or after is None or _is_float8(before.dtype) or _is_float8(after.dtype):
            return False
        return before.is_floating_point() or not _overflows(after.dtype)
    return name in WHOLE or name in PARTS


def _is_float8(dtype: torch.dtype) -> bool:
    """Whether ``dtype`` is a floating one of 8 bits or fewer: whether a cast to it overflows depends on torch."""
    return dtype.is_floating_point and dtype.itemsize < 2


def largest_after(node: Node) -> Callable[[float], float] | None:
    """Return the largest magnitude of the result of ``node`` as a function of its input's; None if it is not one.

    It is one for products and quotients with a number, integer powers, and increasing odd functions.
    """
    if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable or node.kwargs:
        return None
    source, *numbers = node.args or (None,)
    if not isinstance(source, Node) or not can_be_measured(source):
        return None
    name = base_name(node).partition("::")[2]
    if not numbers:
        return _ODD.get(name)
    number = numbers[0]
    if len(numbers) > 1 or not isinstance(number, int | float) or not math.isfinite(number):
        return None
    if name in ("mul", "div") and number:
        return partial(operator.mul if name == "mul" else _quotient, abs(number))
    return partial(_power, int(number)) if name == "pow" and number in range(1, 9) else None


def _quotient(number: float, magnitude: float) -> float:
    return magnitude / number


def _power(exponent: int, magnitude: float) -> float:
    return math.prod([magnitude] * exponent)


_ODD: dict[str, Callable[[float], float]] = {"tanh": math.tanh, "erf": math.erf, "atan": math.atan, "asinh": math.asinh}


def is_narrowing(node: Node) -> bool:
    """Whether ``node`` converts to a floating dtype of a smaller range, in which a finite value can become infinite."""
    limits = converted_limits(node)
    return limits is not None and can_be_measured(node) and limits[0].max > limits[1].max


def converted_limits(node: Node) -> tuple[torch.finfo, torch.finfo] | None:
    """Return the limits of the floating dtypes that ``node`` converts from and to; None if it converts no floats."""
    if not node.args or not is_conversion(node):
        return None
    before, after = dtype_of(node.args[0]), dtype_of(node)
    if before is None or after is None or not (before.is_floating_point and after.is_floating_point):
        return None
    return torch.finfo(before), torch.finfo(after)


def is_conversion(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and base_name(node) in _CONVERSIONS


def _overflows(dtype: torch.dtype) -> bool:
    """Whether there are integers that are infinite in ``dtype``."""
    return dtype.is_floating_point and largest_finite(dtype) < 2.0**64


def largest_finite(dtype: torch.dtype) -> float:
    """Return the largest number that rounds to a finite number in ``dtype``."""
    limits = torch.finfo(dtype)
    return limits.max * (1 + limits.eps / 4) if dtype.itemsize == 2 else limits.max


def is_made_of_numbers(node: Node) -> bool:
    """Whether ``node``, such as ``zeros`` or ``full_like``, makes a tensor from finite numbers alone."""
    if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable or holds_infinity(node):
        return False
    if base_name(node) in _LIKE:
        return True
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    reads = any(isinstance(leaf, Node) and isinstance(leaf.meta.get("val"), Tensor) for leaf in leaves)
    return not reads and not base_name(node).startswith("aten::empty")


_LIKE = aten_ops("zeros_like ones_like rand_like randn_like full_like new_zeros new_ones new_full _efficientzerotensor")


def holds_infinity(node: Node) -> bool:
    """Whether a number among the arguments of ``node`` is infinite or NaN: the program intends such a result."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    return any(isinstance(leaf, float) and not math.isfinite(leaf) for leaf in leaves)


def name_after(node: Node) -> str:
    """Return the name in :data:`MEASURED` of what an input holds after the run, because the graph writes to it."""
    return f"{node.name} after the run"


def measured_results(output: Node) -> set[Node]:
    """Return the results of a graph that are parts of a value, whose magnitude does not say if they are finite."""
    leaves = {leaf for leaf in pytree.tree_leaves(output.args[0]) if isinstance(leaf, Node)}
    return {leaf for leaf in leaves if leaf.op != "placeholder" and can_be_measured(leaf) and not _is_whole(leaf)}


def _is_whole(node: Node) -> bool:
    """Whether ``node`` holds exactly the elements of one value that is measured."""
    while passes_on(node) and node.target is not operator.getitem:
        if base_name(node) in PARTS or len(node.all_input_nodes) != 1:
            return False
        node = node.all_input_nodes[0]
    return is_measured(node, ()) and largest_after(node) is None
