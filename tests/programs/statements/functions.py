"""Custom autograd.Functions as people write them: what they save, how they are decorated, what they return.

Their gradients are formulas of whatever they save; no mathematics is meant.
"""

from collections.abc import Sequence
from itertools import combinations

import torch
from programs.draft import Draft, Unfit
from programs.functions import Function, incoming
from programs.statements.registry import statement

_UNARY = (
    "{} * 3", "{}.tanh()", "{}.softmax(-1)", "{}.relu()", "{}.sigmoid()", "{}.round()", "{}.view_as({})",
    "{}.clone()", "-{}", "{}.clamp(-1, 1)", "{}.abs().sqrt()", "{}.float()",
)  # fmt: skip
_BINARY = (
    "{} * {}", "{} + {}", "torch.maximum({}, {})", "torch.where({0} > {1}, {0}, {1})", "{} / ({}.abs() + 1)",
    "({} * {}).sum(-1, keepdim=True)",
)  # fmt: skip

#: Gradients of an input, from one of an output; the others read something saved, or another output's gradient too.
_PASSED = ("{g}", "{g} * 3", "-{g}", "{g}.clone()", "{g}.clamp(-1, 1)")
_OF_SAVED = (
    "{g} * {s}", "{g} * (1 - {s} * {s})", "({g} - ({g} * {s}).sum(-1, keepdim=True)) * {s}", "{g} * ({s} > 0)",
    "torch.where({s} > 0, {g}, 0.1 * {g})", "{g}.masked_fill({s} < 0, 0)", "{s} * {g} + {t}", "{g} * {s} * {t}",
)  # fmt: skip
_OF_TWO = ("{g} + {h}", "{g} * 2 - {h}")
_OF_TWO_AND_SAVED = ("{g} * {s} + {h}", "{g} * {s} + {h} * {t}")

#: Decorators of both methods; float32 and other dtypes turn autocast off inside.
_ONCE = "@torch.autograd.function.once_differentiable"
_FORWARD, _BACKWARD = '@torch.amp.custom_fwd(device_type="cpu")', '@torch.amp.custom_bwd(device_type="cpu")'
_CASTING = '@torch.amp.custom_fwd(device_type="cpu", cast_inputs={})'
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@statement(weight=3)
def function(d: Draft) -> None:
    """Elementwise, of one to three inputs and outputs.

    Its second derivatives are wrong with torch.compile alone, unless they are those of its formulas.
    """
    _call(d, *_elementwise(d))


def _elementwise(d: Draft) -> tuple[Function, list[str]]:
    """A Function and its operands."""
    if d.setting.schedule == "twice" and not d.chance(4):
        raise Unfit
    x = d.value(lambda v: v.dim() >= 1)
    operands = [x]
    for _ in range(d.pick((0, 0, 1, 1, 2))):
        other = d.alike(x) if d.chance() else d.parameter(*d.shape(x))
        # Dynamo breaks the graph where one tensor comes twice.
        operands.append(d.parameter(*d.shape(x)) if other in operands else other)
    if len(set(operands)) < len(operands):
        raise Unfit
    inputs = ("a", "b", "c")[: len(operands)]
    lines, outputs = _computation(d, inputs)
    apart = d.chance(3)
    forward, backward = _decorators(d, apart)
    names = [*inputs, *outputs] if apart else [*inputs, *(line.partition(" = ")[0] for line in lines)]
    saved, kept = d.pick(_choices(names)), d.pick(((), (), (d.pick(names),)))
    mask = d.chance(4) and len(outputs) < 3
    if mask:
        lines, outputs = (*lines, f"m = {inputs[0]} > 0"), (*outputs, "m")
    notes, unread = ["ctx.mark_non_differentiable(m)"] * mask, {"m"}
    if len(outputs) - mask > 1 and d.chance(4):
        notes, unread = [f"ctx.mark_non_differentiable({', '.join(outputs[-1 - mask :])})"], {*outputs[-1 - mask :]}
    sources = [g for g, output in zip(incoming(len(outputs)), outputs, strict=True) if output not in unread]
    materialised = not _may_break(d) or not d.chance(6)
    if not materialised:
        notes.append("ctx.set_materialize_grads(False)")
    number = d.chance(5)
    gradients = tuple(_gradient(d, at, sources, (*saved, *kept), materialised) for at in range(len(inputs)))
    packed = len(outputs) == 1 and d.chance(6)
    name = d.fresh("Unary" if len(inputs) == len(outputs) == 1 and not (number or packed) else "Function")
    how = {"forward": forward, "backward": backward, "apart": apart, "packed": packed}
    return Function(name, inputs, number, lines, outputs, saved, kept, tuple(notes), gradients, **how), operands


def _computation(d: Draft, inputs: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The lines of a forward, and its outputs; each output is read by those after it, or not."""
    known, lines = list(inputs), []
    outputs = ("y", "z")[: d.pick((1, 1, 2))]
    nested = [f"{name}.apply({{}})" for name in d.definitions if name.startswith("Unary")]
    for name in (*["u"] * d.chance(), *outputs):
        form = d.pick(_UNARY + tuple(nested)) if len(known) == 1 or d.chance() else d.pick(_BINARY)
        a, b = d.pick(known[::-1]), d.pick(known[::-1])
        lines.append(f"{name} = {form.format(a, b) if '{0}' in form or form in _BINARY else form.replace('{}', a)}")
        known.append(name)
    return tuple(lines), outputs


def _choices(names: Sequence[str]) -> list[tuple[str, ...]]:
    """What may be saved: nothing, each name, two of them, one twice, all."""
    last = names[-1]
    return [(last,), *[(name,) for name in names], *combinations(names, 2), (last, last), tuple(names), ()]


def _decorators(d: Draft, apart: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of forward and backward. ``custom_fwd`` needs a context."""
    once = (_ONCE,) if d.chance(4) else ()
    if apart or d.chance():
        return (), once
    forward = d.pick((_FORWARD, *(_CASTING.format(dtype) for dtype in _DTYPES)))
    return (forward,), d.pick(((_BACKWARD, *once), (*once, _BACKWARD), once))


def _may_break(d: Draft) -> bool:
    """Whether the graph may break here without a difference to autocast."""
    return d.setting.ambient and not d.setting.scaled and d.setting.schedule != "rewritten"


def _gradient(d: Draft, at: int, sources: Sequence[str], saved: Sequence[str], materialised: bool) -> str:
    if d.chance(8) and at:
        return "None"
    forms = _PASSED + (_OF_SAVED if saved else ())
    if len(sources) > 1 and materialised:
        forms += _OF_TWO + (_OF_TWO_AND_SAVED if saved else ())
    if saved:
        forms = forms[::-1]
    g, h = d.pick(sources), sources[-1]
    s, t = (d.pick(saved), d.pick(saved)) if saved else ("", "")
    formula = d.pick(forms).format(g=g, h=h, s=s, t=t)
    if not materialised:
        return f"None if {g} is None else {formula}"
    return f"{formula} if ctx.needs_input_grad[{at}] else None" if d.chance(4) else formula


@statement()
def function_of_products(d: Draft) -> None:
    """A matrix product, perhaps with a ReLU.

    All are decorated: without it autocast multiplies float32 in the backward, where a graph follows the policy.
    """
    _call(d, *_product(d))


def _product(d: Draft) -> tuple[Function, list[str]]:
    """A Function and its operands."""
    x = d.ranked(2)
    operands = [x, d.parameter(d.shape(x)[-1], d.pick((8, 4)))]
    cast = d.pick((None, None, *_DTYPES))
    rectified = d.chance()
    lines = ("y = (a @ b).relu()" if rectified else "y = a @ b",)
    g = "(g * (y > 0))" if rectified else "g"
    forward = _FORWARD if cast is None else _CASTING.format(cast)
    saved = ("a", "b", "y") if rectified else ("a", "b")
    gradients = f"{g} @ b.t()", f"a.t() @ {g}"
    if cast is None:
        operands = [d.lowered(operand) for operand in operands]
    name = d.fresh("Function")
    kept: tuple[str, ...] = ()
    if d.chance(4):
        saved, kept = saved[1:], saved[:1]
    return Function(
        name, ("a", "b"), False, lines, ("y",), saved, kept, (), gradients, (forward,), (_BACKWARD,)
    ), operands


@statement()
def function_left_whole(d: Draft) -> None:
    """In a call that Dynamo leaves whole, and in which only an ambient autocast acts."""
    if not d.setting.ambient:
        raise Unfit
    decorator = d.pick(("@torch.compiler.allow_in_graph", "@torch._dynamo.nonstrict_trace"))
    _call(d, *d.pick((_elementwise, _product))(d), decorator)


@statement()
def function_in_place(d: Draft) -> None:
    """Writes to its input and says so; returns it, perhaps with another output."""
    x = d.writable(1)
    if d.values[x].is_leaf and d.values[x].requires_grad:
        raise Unfit
    lines = d.pick((("a.mul_(2)",), ("a.add_(1)",), ("a.relu_()",), ("y = a * 2", "a.tanh_()")))
    outputs = ("a", "y") if len(lines) > 1 and d.chance() else ("a",)
    saved = d.pick((("a",), ()) if "y" not in outputs else (("a",), ("y",), ("a", "y"), ()))
    gradient = _gradient(d, 0, incoming(len(outputs)), saved, True)
    _call(
        d,
        Function(d.fresh("Function"), ("a",), False, lines, outputs, saved, (), ("ctx.mark_dirty(a)",), (gradient,)),
        [x],
    )


def _call(d: Draft, function: Function, operands: Sequence[str], decorator: str = "") -> None:
    """Define the Function and apply it; one whose backward raises is left out.

    ``decorator``: of a function around the call, if there is to be one.
    """
    arguments = ", ".join([*operands, *["2.0"] * function.number])
    d.define(function.name, function.source())
    apply = f"{function.name}.apply"
    if decorator:
        apply = d.fresh("whole")
        d.define(apply, f"{decorator}\ndef {apply}(*operands):\n    return {function.name}.apply(*operands)\n")
    call = f"{apply}({arguments})" + "[0]" * function.packed
    with d.whole():
        d.differentiate(*d.let_several(call, len(function.outputs)))
