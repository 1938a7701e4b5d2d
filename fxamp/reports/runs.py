"""Record for each compiled graph the callables that called it and the parameters that it read.

Dynamo compiles code, and reuses the graphs of one model for every model of the same class. So each graph records its
callers and parameters as it runs. Normally this costs one lookup; the Python stack is walked only if the callable or
the parameters are new.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from types import FrameType
from typing import Any

import torch

from fxamp.graph.submodules import ParameterSlot, named_parameters, submodules
from fxamp.reports import GraphRecord
from fxamp.reports.break_reasons import Place
from fxamp.torch_private import backend_of

#: After this many records for one graph, recording stops: its parameters are new tensors at each call.
_MOST = 4096

#: The qualified name of the function that torch.compile returns. If torch renames it, reports of functions list no
#: graphs; reports of modules still work.
_COMPILED_CALL = "_TorchDynamoContext."


class Runs:
    """One compiled graph, with weak references to the callables and modules for which it ran.

    Its parameters are those that these modules have now. torch.utils.swap_tensors refuses tensors with weak references,
    so only a parameter whose module is not found has one.

    ``under_autocast``: its policy follows a torch.autocast around it or in it. ``function``: the function that Dynamo
    made the graph of; None if unknown. ``noted`` is called with this object whenever the graph ran for something new,
    or something that it ran for is gone. ``calls`` counts its runs.
    """

    def __init__(
        self, record: GraphRecord, under_autocast: bool, function: Place | None, noted: "Callable[[Runs], None]"
    ) -> None:
        self.record = record
        self.under_autocast = under_autocast
        self.function = function
        self.calls = 0
        self._noted = noted
        self._ran = False
        self._owners: dict[int, weakref.ref[Any]] = {}
        self._backends: dict[int, weakref.ref[Any]] = {}
        self._contexts: dict[int, weakref.ref[Any]] = {}
        self._watch: Callable[[Any], None] | None = None
        self._slots: dict[tuple[int, str], ParameterSlot] = {}
        self._loose: dict[int, weakref.ref[Any]] = {}
        self._sources: Sequence[str] = ()
        self._names: dict[int, set[str]] = {}
        self._seen: set[tuple[int, ...]] = set()

    def noting(
        self, compiled: Callable[..., Any], inputs: Sequence[Any], sources: Sequence[str] = ()
    ) -> Callable[..., Any]:
        """Return ``compiled``, which takes values like ``inputs``, with each call recorded.

        ``sources``: Dynamo's expressions for the inputs; without one, the module of a parameter that a function reads
        is not found. The caller that the graph is being compiled for is recorded at once: its first call follows.
        """
        at = [position for position, value in enumerate(inputs) if isinstance(value, torch.nn.Parameter)]
        self._sources = [sources[position] for position in at] if sources else [""] * len(at)
        read = itemgetter(*at) if len(at) > 1 else itemgetter(slice(at[0], at[0] + 1) if at else slice(0))
        seen = self._seen

        def call(*args: Any) -> Any:
            self.calls += 1
            frame = sys._getframe(1)
            if (id(caller(frame)), *map(id, read(args))) not in seen:
                self._note(read(args), frame)
            return compiled(*args)

        frame = sys._getframe(1)
        if caller(frame) is not None:
            self._note(read(tuple(inputs)), frame)
        return call

    @property
    def forgotten(self) -> bool:
        """Whether nothing that the graph ran for still exists."""
        return self._ran and not self._owners

    def ran_for(self, owner: object) -> bool:
        """Whether the graph ran in a call of ``owner``, a module or function, or read one of its parameters."""
        if _holds(self._owners, owner):
            return True
        return isinstance(owner, torch.nn.Module) and self.reads_any(p for _, p in named_parameters(owner))

    def ran_through(self, backend: object) -> bool:
        """Whether the graph ran in a call of what torch.compile returned with ``backend``."""
        return _holds(self._backends, backend)

    def reads_any(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether the graph read one of these very parameters."""
        own = self._parameters()
        return any(id(parameter) in own for parameter in parameters)

    def reads_any_of(self, other: "Runs") -> bool:
        """Whether the graph read a parameter that ``other`` read."""
        return self.reads_any(other._parameters().values())

    def _parameters(self) -> dict[int, torch.Tensor]:
        """Return the parameters that the graph read, by their ids."""
        noted: list[Callable[[], Any]] = [*self._slots.values(), *self._loose.values()]
        return {id(parameter): parameter for find in noted if (parameter := find()) is not None}

    def watch_calls(self, watch: Callable[[Any], None]) -> None:
        """Call ``watch`` with Dynamo's context of each call of torch.compile that the graph ran or will run in."""
        self._watch = watch
        for noted in list(self._contexts.values()):
            if (context := noted()) is not None:
                watch(context)

    def parameters_read(self, module: torch.nn.Module) -> set[str]:
        """Return the names of the parameters of ``module`` that the graph read.

        FSDP replaces the tensors under these names while a module runs, so names are recorded too.
        """
        noted = self._names.get(id(module), set()) if _holds(self._owners, module) else set()
        own = self._parameters()
        return noted | {name for name, value in named_parameters(module) if id(value) in own}

    def _note(self, read: Sequence[torch.Tensor], frame: FrameType | None) -> None:
        if len(self._seen) >= _MOST:
            return
        self._seen.add((id(caller(frame)), *map(id, read)))
        self._ran = True
        ids = {id(parameter) for parameter in read}
        context = compiled_call(frame)
        for noted, value in ((self._contexts, context), (self._backends, backend_of(context))):
            if value is not None:
                noted[id(value)] = weakref.ref(value, self._forget)
        if context is not None and self._watch is not None:
            self._watch(context)
        found: set[int] = set()
        for owner in _called(frame):
            self._owners[id(owner)] = weakref.ref(owner, self._forget)
            if isinstance(owner, torch.nn.Module):
                named = {name for name, value in named_parameters(owner) if id(value) in ids}
                self._names.setdefault(id(owner), set()).update(named)
                found |= self._note_slots(submodules(owner), ids - found)
        if ids - found:
            found |= self._note_slots(enumerate(_holders(self._sources, frame)), ids - found)
        self._loose |= {id(value): weakref.ref(value, self._forget) for value in read if id(value) not in found}
        self._noted(self)

    def _note_slots(self, modules: Iterable[tuple[Any, torch.nn.Module]], ids: set[int]) -> set[int]:
        """Record where ``modules`` have parameters of these ids, and return the ids that they have."""
        found = set()
        for _, module in modules if ids else ():
            for name, value in module._parameters.items():
                if id(value) in ids:
                    self._slots[id(module), name] = ParameterSlot(weakref.ref(module, self._forget), name)
                    found.add(id(value))
        return found

    def _forget(self, dead: weakref.ref[Any]) -> None:
        """Drop the ids of ``dead``: another object may reuse them."""
        self._seen.clear()
        for noted in (self._owners, self._backends, self._contexts, self._loose):
            for key in [key for key, reference in noted.items() if reference is dead]:
                del noted[key]
                self._names.pop(key, None)
        for place in [place for place, slot in self._slots.items() if slot.module is dead]:
            del self._slots[place]
        self._noted(self)


def _holds(noted: dict[int, weakref.ref[Any]], value: object) -> bool:
    return id(value) in noted and noted[id(value)]() is value


def _holders(sources: Sequence[str], frame: FrameType | None) -> Iterator[torch.nn.Module]:
    """Yield the modules whose parameters have these ``sources``, if they are found."""
    program = _program(frame)
    scope = {} if program is None else {"L": program.f_locals, "G": program.f_globals, "__builtins__": {}}
    for expression in dict.fromkeys(source.rpartition("._parameters[")[0] for source in sources):
        try:
            holder = eval(expression, scope)
        except Exception:  # an expression that Dynamo evaluates with names of its own
            continue
        if isinstance(holder, torch.nn.Module):
            yield holder


def _program(frame: FrameType | None) -> Any:
    """Return the frame that Dynamo compiles, or else the innermost frame that runs what it compiled; None if unknown.

    Dynamo's own frames have the frame that it compiles as a variable.
    """
    running = None
    while frame is not None and not frame.f_code.co_qualname.startswith(_COMPILED_CALL):
        if not str(frame.f_globals.get("__name__")).startswith("torch._dynamo."):
            running = running or frame
        elif "frame" in frame.f_code.co_varnames and hasattr(compiling := frame.f_locals.get("frame"), "f_locals"):
            return compiling
        frame = frame.f_back
    return running


def original(compiled: Any) -> Any:
    """Return the module or function that torch.compile made ``compiled`` from; anything else unchanged.

    A module's class may forward attributes to a module inside of it; this reads only attributes of the module itself.
    """
    if isinstance(compiled, torch.nn.Module):
        return compiled._orig_mod if isinstance(compiled, torch._dynamo.OptimizedModule) else compiled
    return getattr(compiled, "_torchdynamo_orig_callable", compiled)


def caller(frame: FrameType | None) -> object:
    """Return what the innermost torch.compile call on the Python stack runs: a module, or else a function."""
    function = _of_compiled_call(frame, "fn")
    bound_to = getattr(function, "__self__", None)
    return bound_to if isinstance(bound_to, torch.nn.Module) else function


def compiled_call(frame: FrameType | None) -> object:
    """Return Dynamo's context of the innermost torch.compile call on the Python stack; None if there is none."""
    return _of_compiled_call(frame, "self")


def _of_compiled_call(frame: FrameType | None, name: str) -> object:
    """Return a variable of the innermost torch.compile call on the Python stack; None if there is no such call."""
    while frame is not None and not frame.f_code.co_qualname.startswith(_COMPILED_CALL):
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get(name)


def _called(frame: FrameType | None) -> Iterator[Any]:
    """Yield the modules and compiled functions whose calls are on the Python stack.

    Lightning compiles and calls a module's methods, so the module of a called method is included.
    """
    while frame is not None:
        if frame.f_code.co_filename == torch.nn.modules.module.__file__:
            module = frame.f_locals.get("self")
            if isinstance(module, torch.nn.Module):
                yield module
        elif frame.f_code.co_qualname.startswith(_COMPILED_CALL):
            function = frame.f_locals.get("fn")
            if hasattr(function, "__code__"):
                yield function
            bound_to = getattr(function, "__self__", None)
            if isinstance(bound_to, torch.nn.Module):
                yield bound_to
        frame = frame.f_back
