"""Functions for which Dynamo's recompile limit is reached, and how many calls have run without casts since.

From then on Dynamo does not call fxamp for such a function: a call that fits none of its graphs runs uncompiled. So
fxamp watches each later call of the compiled function, and counts it if no graph of the function ran in it. Under
torch.autocast no casts are lost, and nothing is counted.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxamp.devices import DEVICES
from fxamp.reports.break_reasons import Place, described, place_of, places_of
from fxamp.reports.registry import graphs_of_function, is_fxamp, records_of
from fxamp.reports.runs import Runs, caller, compiled_call, original
from fxamp.reports.warnings import Example, warn_once
from fxamp.torch_private import (
    RecompileLimit,
    backend_of,
    compiled_code,
    context_of,
    on_each_call,
    on_each_compilation,
    on_recompile_limit,
)

#: The limits in force, by function.
_limits: dict[Place, "Limit"] = {}

REMEDIES = (
    "Compile with dynamic=True or mark the sizes that change with torch._dynamo.mark_dynamic, raise the limit, or "
    "keep torch.autocast around the calls."
)
_REACHED = (
    "Dynamo reached torch._dynamo.config.%s (%s) and compiles no more graphs of %s. Why the last one did not fit: %s. "
    f"Calls that fit none of its graphs run as written, without casts; fxamp.report counts them. {REMEDIES}"
)


def _nothing(*_: object) -> None:
    """Do nothing after a call that is not counted."""


class Limit:
    """A limit that Dynamo reached for one function, and the calls without casts since, by module or function called."""

    def __init__(self, reached: RecompileLimit, graphs: Sequence[Runs]) -> None:
        self.place = place_of(reached.code)
        self._reached = reached
        self._graphs = tuple(graphs)
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()
        self._uncast: dict[int, tuple[weakref.ref[Any], int]] = {}

    @property
    def loses_casts(self) -> bool:
        """Whether a call without a graph lacks casts: no if all graphs follow torch.autocast, or have none."""
        return not self._graphs or any(graph.record.casts and not graph.under_autocast for graph in self._graphs)

    def watch(self, compiled: Any) -> None:
        """Count the calls of ``compiled``, what torch.compile returned or its context, from the next one on."""
        context = context_of(compiled)
        if context not in self._watched:
            self._watched.add(context)
            on_each_call(context, self._enter)

    def count(self, owner: Any) -> None:
        """Count a call of ``owner``, a module or function; the first one of any is logged."""
        self._uncast[id(owner)] = weakref.ref(owner), self.uncast_calls(owner) + 1
        reached = self._reached
        what = reached.setting, str(reached.most), described(self.place)
        warn_once(__name__, _REACHED, *what, Example(reached.reason))

    def uncast_calls(self, owner: Any) -> int:
        """Return how many calls of ``owner`` were counted."""
        counted, calls = self._uncast.get(id(owner), (None, 0))
        return calls if counted is not None and counted() is owner else 0

    def line(self, calls: str) -> str:
        """Return the line of a report; ``calls`` says how many were without casts."""
        reached = self._reached
        setting = f"torch._dynamo.config.{reached.setting} is {reached.most}"
        return f"{described(self.place)}: {calls}; {setting}, why the last one did not fit: {reached.reason}"

    def _enter(self) -> Callable[[], None]:
        if _limits.get(self.place) is not self or under_autocast():
            return _nothing
        before = self._runs()

        def leave() -> None:
            if self._runs() == before:
                self.count(caller(sys._getframe(1)))

        return leave

    def _runs(self) -> int:
        return sum(graph.calls for graph in self._graphs)


def limited_functions(compiled: Any) -> list[str]:
    """List the functions of ``compiled``, a module or function, that ran without casts as a limit was reached."""
    lines = []
    for place in places_of(compiled, _limits):
        limit, calls = _limits[place], _limits[place].uncast_calls(original(compiled))
        if calls:
            lines.append(limit.line(f"{calls} call{'s' * (calls > 1)} without casts"))
        elif limit.loses_casts and not records_of(compiled):
            lines.append(limit.line("no call had a graph"))
    return lines


def watch_limits(compiled: Any, call: Any) -> bool:
    """Whether a limit is reached for a function of ``compiled``, which calls ``call``; its calls are then counted."""
    limits = [_limits[place] for place in places_of(compiled, _limits)]
    for limit in limits:
        if limit.loses_casts:
            limit.watch(call)
    return bool(limits)


def any_limit() -> bool:
    """Whether a limit is reached for any function."""
    return bool(_limits)


def under_autocast() -> bool:
    """Whether torch.autocast is on, for any device."""
    return any(map(torch.is_autocast_enabled, DEVICES))


def _note(reached: RecompileLimit) -> None:
    """Watch all calls that run the function, if what is called is compiled with fxamp."""
    frame = sys._getframe(1)
    context = compiled_call(frame)
    if not is_fxamp(backend_of(context)):
        return
    graphs = graphs_of_function(place_of(reached.code))
    limit = _limits[place_of(reached.code)] = Limit(reached, graphs)
    if not limit.loses_casts:
        return
    limit.watch(context)
    for graph in graphs:
        graph.watch_calls(limit.watch)
    if not under_autocast():
        limit.count(caller(frame))


def _forget(*_: object) -> None:
    """Drop the limit of a function that Dynamo compiles again, as after ``torch._dynamo.reset``."""
    code = compiled_code()
    if code is not None:
        _limits.pop(place_of(code), None)


on_recompile_limit(_note)
on_each_compilation(_forget, _nothing)
