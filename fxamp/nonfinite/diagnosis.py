"""Diagnose a run: the value to blame, its inputs, and a rule to try."""

from dataclasses import replace

from fxamp.graph_text import Entry
from fxamp.nonfinite.advice import is_narrow, rule_in_float32
from fxamp.nonfinite.flow import Flow, Kind
from fxamp.nonfinite.origins import Readings, State
from fxamp.reports.nonfinite import NonFinite, Reading

#: How many of the ops that the value reached a diagnosis names.
_NAMED = 5


def diagnose(
    readings: Readings, origin: int, step: int, before: Readings | None, forward: Readings | None, scaled: bool
) -> NonFinite:
    """Return the diagnosis of the value at position ``origin``.

    ``before``: the last readings without an alarm, None if there are none. ``forward``: for a backward, the forward's
    readings. An op in the backward of a Function keeps its own name; any other op of a backward is named together with
    the op of the forward.
    """
    flow, value = readings.flow, readings.flow.values[origin]
    inputs = _floating(readings, origin)
    derived = None if forward is None else forward.flow.position(value.forward)
    own = None if forward is None or derived is not None else forward.flow.in_body(value.forward)
    return NonFinite(
        entry=value.entry if own is None else replace(own, name=value.forward, values=value.entry.values),
        kind=str(value.kind if own is None else Kind.OP),
        region="forward" if forward is None else "backward",
        value="nan" if readings.states[origin] is State.NAN else "inf",
        step=step,
        inputs=tuple(_reading(readings, at) for at in inputs),
        before=None if before is None else before.magnitudes[origin],
        casts=tuple(_cast(entry) for at in inputs if (entry := flow.values[at].entry).is_cast and is_narrow(entry)),
        next_ops=_reached(readings, origin),
        advice=_advice(readings, origin, forward, own),
        forward=None if forward is None or derived is None else forward.flow.values[derived].entry,
        gradients=() if forward is None else _owners(readings, forward.flow),
        scaled=scaled,
        last=step,
    )


def _owners(readings: Readings, forward: Flow) -> tuple[str, ...]:
    """Return the names of the inputs whose gradients are not finite."""
    return tuple(forward.inputs[owner] for at, owner in readings.flow.owners if readings.states[at])


def _floating(readings: Readings, origin: int) -> list[int]:
    """Return the positions of the floating values that the op read."""
    values = readings.flow.values
    return [at for at in values[origin].inputs if values[at].limit]


def _reading(readings: Readings, at: int) -> Reading:
    value = readings.flow.values[at]
    what = value.entry.target if value.kind is Kind.OP else str(value.kind)
    return Reading(value.entry.name, what, value.entry.dtype, readings.magnitudes[at])


def _cast(entry: Entry) -> str:
    return f"{entry.inputs[0]} to {entry.dtype} {entry.inserted}"


def _reached(readings: Readings, origin: int) -> tuple[str, ...]:
    values = readings.flow.values
    reached = [at for at in readings.reached_from(origin) if values[at].number is not None]
    return tuple(f"{values[at].entry.name} ({values[at].entry.target})" for at in reached[:_NAMED])


def _advice(readings: Readings, origin: int, forward: Readings | None, own: Entry | None) -> str:
    """Return a rule that keeps the op in float32, or the op of the ``forward`` whose gradient it computes.

    Returns "" where a wider dtype does not help: if nothing has 16 bits, or an input of the op is infinite. ``own``:
    the op of a Function's backward.
    """
    flow, value = readings.flow, readings.flow.values[origin]
    if value.kind is not Kind.OP or any(readings.states[at] for at in _floating(readings, origin)):
        return ""
    narrow = is_narrow(value.entry)
    if forward is None:
        return rule_in_float32(_to_widen(readings, origin, narrow))
    if own is not None:
        return rule_in_float32([own] if narrow else [])
    # A sum of gradients belongs to no op, but its terms do.
    belongs = [value.forward] if value.forward else [flow.values[at].forward for at in value.inputs]
    derived = [at for name in belongs if (at := forward.flow.position(name)) is not None]
    return rule_in_float32([entry for at in derived for entry in _to_widen(forward, at, narrow, backward=True)])


def _to_widen(readings: Readings, at: int, narrow: bool, backward: bool = False) -> list[Entry]:
    """Return the ops that must run in float32 so that the value at ``at``, or its gradient, is finite.

    ``narrow``: the non-finite value has 16 bits. If not, the ops that made its inputs may be the cause, provided that
    the op itself is :data:`_SENSITIVE`.
    """
    value, values = readings.flow.values[at], readings.flow.values
    if backward and value.op in _CONVERSIONS:
        return [entry for source in value.inputs for entry in _makers(readings, source)] if narrow else []
    if value.entry.is_cast:
        readers = [reader.entry for reader in values if at in reader.inputs and reader.kind is Kind.OP]
        return readers if narrow else []
    if value.op in _CONVERSIONS:
        return []
    sensitive = value.op in _SENSITIVE
    makers = [entry for source in _floating(readings, at) for entry in _makers(readings, source)] if sensitive else []
    return [value.entry, *makers] if makers or narrow else []


#: Ops for which a rule changes nothing, because the dtype to convert to is among their arguments.
_CONVERSIONS = frozenset({"to", "to_copy", "type_as", "convert_element_type"})

#: Ops that return an infinity or a NaN for an input that an earlier op rounded to zero or below.
_SENSITIVE = frozenset({"div", "reciprocal", "rsqrt", "sqrt", "log", "log2", "log10", "log1p", "pow", "acos", "asin"})


def _makers(readings: Readings, at: int) -> list[Entry]:
    """Return the op of the program that made a 16-bit value, before casts and views; earlier ones if it is zero."""
    values, makers, left = readings.flow.values, dict[int, Entry](), [at]
    while left:
        at = left.pop()
        value = values[at]
        if value.kind is not Kind.OP or at in makers or not is_narrow(value.entry):
            continue
        own = value.number is not None and not value.entry.is_cast
        if own:
            makers[at] = value.entry
        if not own or not readings.magnitudes[at]:
            left += value.inputs
    return list(makers.values())
