"""Ops that jump, and that a backward recomputes from a saved value: rounding that value could change their results.

A partitioned backward repeats ops of the forward whose results it does not save. Where such an op is continuous, a
saved value that was rounded gives about the same result. A rounding to whole numbers, a comparison, or the position of
the largest element may give another one, which does not match what the forward computed. Comparisons in the backward's
own formulas, such as clamp's, do not count: they err for few elements, as in eager autograd with rounded values.
"""

from collections.abc import Iterator
from math import isinf
from operator import getitem

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fxamp.graph import dtype_of, op_name, tensor_value
from fxamp.passes.shared.saved_values import JUMP, Jump, in_backward, moves_only, saved, saved_places, saved_tensors

_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})

_AT_ZERO = frozenset({"copysign", "heaviside", "logical_not", "sgn", "sign"})

_FLOATING = """
    ceil fix floor floor_divide fmod frac hardshrink remainder round threshold trunc
"""
_OTHERS = """
    _to_copy all any argmax argmin argsort bucketize histc isclose isin logical_and logical_or logical_xor max median
    min mode nonzero searchsorted signbit sort to topk
"""

#: Ops with floating results that jump.
_STEPS = frozenset(_FLOATING.split())

#: Ops that consist of comparisons, or are decomposed into some. Comparisons inside other ops, such as softplus, belong
#: to a continuous function.
_DISCRETE = _COMPARISONS | frozenset(_OTHERS.split())

#: Ops that detect infinities and NaN, which stay what they are when a value is rounded.
_OF_KINDS = frozenset({"isfinite", "isinf", "isnan", "isneginf", "isposinf"})


def mark_jumps(forward: GraphModule, backward: GraphModule, results: int) -> None:
    """Mark the values that ``forward`` saves, after its ``results``, from which ``backward`` recomputes a jump."""
    kept = saved(forward, results)
    for node, place in zip(saved_tensors(kept), saved_places(backward, kept), strict=False):
        found = sorted(_jumps(place), key=lambda jump: jump.at_zero)
        if found:
            node.meta[JUMP] = found[0]


def _jumps(place: Node) -> Iterator[Jump]:
    """Yield the ops that jump among those that the backward recomputes from the value at ``place``."""
    waiting, seen = [(place, True)], set[tuple[Node, bool]]()
    while waiting:
        value, itself = waiting.pop()
        if (value, itself) in seen:
            continue
        seen.add((value, itself))
        for user in value.users:
            unread = user.op != "call_function" or not user.users
            if unread or in_backward(user) or _reads_no_elements(user):
                continue
            if (jump := _jump(user, itself)) is not None:
                yield jump
            elif _may_float(user):
                waiting.append((user, itself and moves_only(user)))


def _jump(call: Node, itself: bool) -> Jump | None:
    """Return how ``call`` jumps, None if it does not; ``itself``: whether it reads the saved value as it is."""
    name, whole = _names(call)
    if name in _AT_ZERO or whole in _AT_ZERO:
        return Jump(whole, itself)
    if name in _STEPS or whole in _STEPS or name.startswith("fake_quantize") or call.kwargs.get("rounding_mode"):
        return None if name == "threshold" and call.args[1] == call.args[2] else Jump(whole)
    if _may_float(call) or name in _OF_KINDS or (whole != name and whole not in _DISCRETE):
        return None
    if name in _COMPARISONS:
        one, other = call.args
        if one is other or (isinstance(other, float) and isinf(other)):
            return None
        return Jump(whole, itself and bool(other == 0))
    return Jump(whole, itself and dtype_of(call) is torch.bool and moves_only(call))


def _names(call: Node) -> tuple[str, str]:
    """Return the bare names of the op of ``call``, and of the op that it was decomposed from, if any."""
    if call.target is getitem and isinstance(call.args[0], Node):
        call = call.args[0]
    target, before = call.target, call.meta.get("original_aten")
    name = target._opname if isinstance(target, OpOverload) else op_name(call)
    name = "_to_copy" if name == "convert_element_type" else name
    return name, before._opname if isinstance(before, OpOverload) else name


def _reads_no_elements(call: Node) -> bool:
    name, _ = _names(call)
    return name.endswith("_like") or name.startswith(("new_", "sym_"))


def _may_float(call: Node) -> bool:
    """Whether ``call`` returns floating-point values, or several values."""
    value = tensor_value(call)
    return isinstance(call.meta.get("val"), (list, tuple)) if value is None else _floats(value.dtype)


def _floats(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
