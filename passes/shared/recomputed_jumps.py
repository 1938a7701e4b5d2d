"""Ops that jump, and that a backward recomputes from a saved value: rounding that value could change their results.

A partitioned backward repeats ops of the forward whose results it does not save. Where such an op is continuous, a
saved value that was rounded gives about the same result. A rounding to whole numbers, a comparison, or the position of
the largest element may give another one, which does not match what the forward computed. Comparisons in the backward's
own formulas, such as clamp's, do not count: they err for few elements, as in eager autograd with rounded values.
Divisions and logarithms count there too: a small value that was rounded to zero gives an infinity. So do equalities
that become numbers: amax's divides by how many elements equal the result, and no rounded element does.
"""

from collections.abc import Iterator
from math import inf, isinf
from operator import getitem
from typing import NamedTuple

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


#: Functions that are infinite at zero; so are powers with a negative exponent.
_INFINITE_AT_ZERO = frozenset({"digamma", "log", "log10", "log2", "reciprocal", "rsqrt"})

#: Functions that are infinite at values to which others are rounded, at 1 and -1.
_INFINITE_ELSEWHERE = frozenset({"erfinv"})

#: Functions that divide by a matrix, or by what it was factored into, and the position of that argument. A rounded one
#: may be singular.
_MATRIX_ARGUMENT = {
    "_linalg_solve_ex": 0,
    "cholesky_inverse": 0,
    "cholesky_solve": 1,
    "linalg_inv_ex": 0,
    "linalg_ldl_solve": 0,
    "linalg_lu_solve": 0,
    "linalg_solve_triangular": 0,
    "triangular_solve": 1,
}

#: Functions that are infinite where their second argument is zero.
_SECOND_ARGUMENT = frozenset({"binary_cross_entropy_backward", "div", "logit_backward", "polygamma"})

#: Backwards whose kernels look for elements that equal the result, if an argument says that it is the largest one.
_EQUAL_INSIDE = frozenset({"_cdist_backward", "_pdist_backward", "_segment_reduce_backward"})

_EXTREMES = (inf, "amax", "amin", "max", "min")

#: What a backward may compute before it looks for equal elements.
_DISTANCES = frozenset({"abs", "sub"})

#: Functions, and products, that are zero where an argument is; a clamp is nearly so, because it guards a division.
_ZERO_AT_ZERO = frozenset({"abs", "clamp", "clamp_min", "mul", "neg", "sqrt", "square"})

#: What a program adds to a divisor at most, so that it is not zero.
_EPSILON = 1e-3


def mark_jumps(forward: GraphModule, backward: GraphModule, results: int) -> None:
    """Mark the values that ``forward`` saves, after its ``results``, from which ``backward`` recomputes a jump."""
    kept = saved(forward, results)
    for node, place in zip(saved_tensors(kept), saved_places(backward, kept), strict=False):
        found = sorted(_jumps(place), key=lambda jump: jump.at_zero)
        if found:
            node.meta[JUMP] = found[0]


def _jumps(place: Node) -> Iterator[Jump]:
    """Yield the ops that jump among those that the backward computes from the value at ``place``."""
    start = _Reached(place, itself=True, zero=True, moved=False)
    waiting, seen = [start], set[_Reached]()
    while waiting:
        reached = waiting.pop()
        if reached in seen:
            continue
        seen.add(reached)
        for user in reached.value.users:
            if user.op != "call_function" or not user.users or _reads_no_elements(user):
                continue
            moves = reached.zero and _is_moved(user)
            following = _Reached(
                user,
                not in_backward(user) and reached.itself and moves_only(user),
                reached.zero and (moves or _is_zero_at_zero(user, reached.value)),
                reached.moved or moves,
            )
            if reached.zero and _has_pole(user, reached.value):
                name, whole = _names(user)
                elsewhere = reached.moved or name in _INFINITE_ELSEWHERE or name in _MATRIX_ARGUMENT
                yield Jump(whole, at_zero=not elsewhere)
            elif (jump := _equality(user) if in_backward(user) else _jump(user, reached.itself)) is not None:
                yield jump
            elif _may_float(user) and (following.zero or not in_backward(user) or _names(user)[0] in _DISTANCES):
                waiting.append(following)


class _Reached(NamedTuple):
    """A value that follows from the saved one.

    ``itself``: it is the saved one. ``zero``: it is zero where that is; with ``moved``, where that has another value.
    """

    value: Node
    itself: bool
    zero: bool
    moved: bool


def _has_pole(call: Node, value: Node) -> bool:
    """Whether ``call`` is infinite, or NaN, where ``value`` is zero, or where the function has another pole."""
    name, _ = _names(call)
    if name == "pow":
        power = call.args[1] if call.args[0] is value else None
        return isinstance(power, (int, float)) and power < 0
    if name in _MATRIX_ARGUMENT:
        return call.args[_MATRIX_ARGUMENT[name]] is value
    return name in _INFINITE_AT_ZERO | _INFINITE_ELSEWHERE or (name in _SECOND_ARGUMENT and call.args[1] is value)


def _is_moved(call: Node) -> bool:
    """Whether ``call`` adds a number that is not small, or subtracts from one, as in ``1 - x * x``."""
    name, _ = _names(call)
    if name not in ("add", "rsub", "sub"):
        return False
    one, other = call.args[:2]
    filled = isinstance(one, Node) and _names(one)[0] in ("fill", "full", "full_like", "ones_like")
    return filled or any(isinstance(number, (int, float)) and abs(number) > _EPSILON for number in (one, other))


def _is_zero_at_zero(call: Node, value: Node) -> bool:
    """Whether ``call`` is zero, or nearly zero, where ``value`` is; a sum of squares may be, with the other square."""
    name, _ = _names(call)
    if name == "add" and all(map(_is_square, call.args[:2])):
        return True
    if name in ("add", "pow"):
        number = call.args[1] if call.args[0] is value else None
        return isinstance(number, (int, float)) and number > 0 and (name == "pow" or number <= _EPSILON)
    return name in _ZERO_AT_ZERO or moves_only(call)


def _is_square(value: object) -> bool:
    if not isinstance(value, Node) or value.op != "call_function":
        return False
    name, _ = _names(value)
    if name == "mul":
        return value.args[0] is value.args[1]
    return name == "square" or (name == "pow" and bool(value.args[1] == 2))


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


def _equality(call: Node) -> Jump | None:
    """Return how ``call`` jumps if it tells which elements of two tensors are equal, and these count as numbers.

    maximum's backward only chooses by them how two equal elements share a gradient.
    """
    name, whole = _names(call)
    if name in _EQUAL_INSIDE:
        return Jump(whole) if any(argument in _EXTREMES for argument in call.args) else None
    if name not in ("eq", "ne") or call.args[0] is call.args[1]:
        return None
    if not all(isinstance(side, Node) for side in call.args) or all(map(_chooses, call.users)):
        return None
    return Jump(whole)


def _chooses(call: Node) -> bool:
    """Whether ``call`` reads a mask only to choose elements by it."""
    name, _ = _names(call)
    if name in ("logical_not", "bitwise_not"):
        return all(map(_chooses, call.users))
    return name in ("where", "masked_fill")


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
    if value is None:
        return isinstance(call.meta.get("val"), (list, tuple))
    return value.is_floating_point() or value.is_complex()
