"""All state that fxamp holds for one optimizer: its settings, and its compiled step, which a device flag can skip."""

import logging
import weakref
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from fxamp.errors import OptionError
from fxamp.optim.bound_step import BoundStep
from fxamp.optim.errors import CountsError, MakesStateError, NotCompilableError
from fxamp.optim.in_backward import BackwardStep, subject
from fxamp.optim.precision.state_dicts import plain_state
from fxamp.optim.precision.state_precision import Precision, unpack_state
from fxamp.optim.programs.lowering import StepOptions
from fxamp.optim.programs.step_parts import CompiledParts, compile_parts, pack_state
from fxamp.optim.reading.fingerprint import own_attributes
from fxamp.optim.reading.layout import Layout, optimized_parameters, read_layout, settings_of
from fxamp.optim.reading.snapshot import Likeness, Snapshot
from fxamp.optim.tracing.counters_as_tensors import counters_as_tensors, numbers_in
from fxamp.optim.tracing.stand_ins import needs_arguments, replaced_step, wrapped_optimizer
from fxamp.policy import OptimizerPrecision
from fxamp.torch_private import compile_lock, is_initialized

log = logging.getLogger(__name__)

MANY_COMPILATIONS = 9
"""The number of compilations that logs a warning: one more than torch.compile's recompile_limit."""
MOST_COUNTED_PROGRAMS = 5
"""The number of programs for different numbers of steps, such as those of a warm-up and after it."""
HOST_DECIDES = "the host decides whether to skip, and waits for the device"
UNCOMPILED = "its step runs uncompiled"
WRAPPER = "it wraps an optimizer without calling torch.optim.Optimizer.__init__; accepted: compiling what it wraps"
MOST_STATE_CREATIONS = 16
"""The kinds of state-creating steps without a warning, because an expert may get its first gradient late."""


@dataclass(frozen=True, eq=False)
class _LastStep:
    """The last step with the same options; the next one reuses its layout if its own snapshot is alike."""

    likeness: Callable[[Snapshot], Likeness]
    layout: Layout
    state: list[Tensor]
    floats: list[float]
    compiled: CompiledParts


class CompiledOptimizer:
    """Compiles and runs the step of one optimizer, without waiting for the device; get it by :meth:`of`.

    The step is compiled again when a property that it was compiled for changes: another parameter has a gradient, a
    group was added, ``weight_decay`` became nonzero. The optimizer still owns its settings, state and ``state_dict``,
    and this object does not keep it alive. The host decides on a step that creates state, such as the first one: either
    the optimizer runs it, or nothing is created.

    Attributes:
        own: the options of ``optimizer.step()`` after :func:`~fxamp.optim.compile_optimizer.compile_optimizer`; None:
            the step is the optimizer's own.
        clip_norm: the norm that it clips gradients to, or None.
        precision: the precision of the state; None: as the optimizer creates it.
        backward_step: steps the parameters while backwards run; None if backwards step nothing.
        reasons: why steps ran uncompiled, or state was not packed, each reason once, in order of occurrence.
        compilations: how often a step was compiled.
        numbers: the names of the state's numbers that steps keep as tensors, and their types.
        counted: the names of settings to which steps add one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.own: StepOptions | None = None
        self.clip_norm: float | None = None
        self.precision: Precision | None = None
        self.backward_step: BackwardStep | None = None
        self.reasons: tuple[str, ...] = ()
        self.compilations = 0
        self.numbers: dict[str, type[int] | type[float]] = {}
        self.counted: frozenset[str] = frozenset()
        self._compiled: dict[Hashable, list[CompiledParts]] = {}
        self._uncompilable: dict[Hashable, str] = {}
        self._creating: set[Hashable] = set()
        self._last: dict[StepOptions, _LastStep] = {}
        self._needs_arguments = needs_arguments(optimizer)
        self._is_wrapper = not is_initialized(optimizer)
        if not self._is_wrapper:
            optimizer.register_state_dict_post_hook(_saved)

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> "CompiledOptimizer":
        """Return the CompiledOptimizer of ``optimizer``, the same object each time."""
        with _creating:
            if optimizer not in _compiled:
                _compiled[optimizer] = CompiledOptimizer(optimizer)
            return _compiled[optimizer]

    @staticmethod
    def known(optimizer: torch.optim.Optimizer) -> "CompiledOptimizer | None":
        """Return the CompiledOptimizer of ``optimizer``; None if :meth:`of` has not made it yet."""
        return _compiled.get(optimizer)

    def keep_state(self, table: OptimizerPrecision | None, seed: int) -> None:
        """From the next compiled step on, store state in the precision of ``table``; None: as the optimizer does."""
        asked = None if table is None or table == OptimizerPrecision() else Precision(table, seed)
        optimizer = self._optimizer()
        if optimizer is not None and self.precision and (asked is None or asked.table != self.precision.table):
            unpack_state(optimizer)
        self.precision = asked

    def step_in_backward(self, asked: bool) -> None:
        """Step the optimizer's parameters in backwards from now on, or stop doing so, as ``asked`` says.

        Raises OptionError if another optimizer steps one of them in backwards.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        before = self.backward_step
        self.backward_step = (before or BackwardStep(optimizer)) if asked else None
        if asked:
            try:
                backward_steps(optimized_parameters(optimizer))
            except OptionError:
                self.backward_step = before
                raise

    def prepare(self, options: StepOptions, arguments: bool = False) -> BoundStep | None:
        """Return the step, ready to run, compiling it if necessary; None if the host must decide.

        The host decides on the first step, which creates the optimizer's state, and on steps that cannot be compiled.
        The log says why, once. ``arguments``: whether the step is called with arguments, such as a closure, which only
        the host can call.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        try:
            if self._is_wrapper:
                raise NotCompilableError(WRAPPER)
            if arguments or self._needs_arguments:
                raise NotCompilableError("its step is called with a closure or other arguments")
            if replaced_step(optimizer):
                raise NotCompilableError("its step was replaced by another function")
            inner = wrapped_optimizer(optimizer)
            if inner is not None:
                raise NotCompilableError(f"its step calls that of another optimizer, {type(inner).__name__}")
            if optimizer.defaults.get("differentiable"):  # torch asks the defaults, not the groups
                raise NotCompilableError("differentiable=True: autograd cannot record a compiled step")
            with torch.no_grad():  # tensors have other properties in inference mode
                try:
                    return self._prepare(optimizer, self._in_precision(options))
                except CountsError as error:
                    self.counted |= error.names
                    return self._prepare(optimizer, self._in_precision(options))
        except MakesStateError as error:
            log.debug("%s: the host decides whether to skip this step: %s", type(optimizer).__name__, error)
        except NotCompilableError as error:
            self._log_once(optimizer, str(error), HOST_DECIDES if options.guarded else UNCOMPILED)
        return None

    def has_run(self, options: StepOptions) -> bool:
        """Whether the optimizer has taken such a compiled step; the next one is probably compiled too."""
        return self._in_precision(options) in self._last

    def _in_precision(self, options: StepOptions) -> StepOptions:
        return options if self.precision is None else options._replace(precision=self.precision)

    def _prepare(self, optimizer: torch.optim.Optimizer, options: StepOptions) -> BoundStep:
        now = Snapshot(optimizer, self.counted)
        last = self._last.get(options)
        likeness = Likeness.OTHER if last is None else last.likeness(now)
        if last is not None and likeness is Likeness.EQUAL:
            own = last.layout
            tensors = [*own.parameters, *now.active, *last.state]
            return BoundStep(optimizer, last.compiled, (own.owners, now.gradients, now.active), tensors, last.floats)
        if last is not None and likeness is Likeness.KIND:
            attributes = own_attributes(optimizer)
            settings = settings_of(optimizer, self.counted)
            layout = replace(last.layout, gradients=now.gradients, settings=settings, attributes=attributes)
            if last.compiled.serves(layout.floats()):
                return BoundStep.of(optimizer, last.compiled, layout)
        layout = read_layout(optimizer, self.counted)
        key = (options, layout.key())
        compiled = self._known(key, layout)
        if compiled is None:
            with compile_lock():
                layout, compiled = self._compile_once(optimizer, layout, options, key)
        # Drop what each step reads again: gradients would stay alive after the user drops them, and attributes and
        # settings may lead to the optimizer.
        self._last[options] = _LastStep(
            Snapshot(optimizer, self.counted).comparison(),
            replace(layout, gradients=[], settings=[], attributes={}),
            layout.state_tensors(),
            layout.floats(),
            compiled,
        )
        return BoundStep.of(optimizer, compiled, layout)

    def _compile_once(
        self, optimizer: torch.optim.Optimizer, layout: Layout, options: StepOptions, key: Hashable
    ) -> tuple[Layout, CompiledParts]:
        """Complete the state and compile. A step that failed to compile is not compiled again."""
        if key in self._uncompilable:
            raise NotCompilableError(self._uncompilable[key])
        if key in self._creating:
            raise MakesStateError("it creates its state")
        try:
            counters = counters_as_tensors(optimizer, layout)
            for owner, entry in counters.items():
                self.numbers |= numbers_in(layout.state.get(owner, {}), entry)
                optimizer.state[layout.owner_of(owner)].update(entry)
            if counters:
                layout = read_layout(optimizer, self.counted)
            changed, reasons = pack_state(optimizer, layout, options)
            for why in reasons:
                self._log_once(optimizer, why, "the state of some parameters stays as it is")
            if changed:
                layout = read_layout(optimizer, self.counted)
            return layout, self._known((options, layout.key()), layout) or self._compile(optimizer, layout, options)
        except CountsError:
            raise
        except NotCompilableError as error:
            self._uncompilable[key] = str(error)
            raise
        except MakesStateError:
            self._creating.add(key)
            if len(self._creating) > MOST_STATE_CREATIONS:
                consequence = HOST_DECIDES if options.guarded else UNCOMPILED
                self._log_once(optimizer, "its steps keep creating state", consequence)
            raise

    def _known(self, key: Hashable, layout: Layout) -> CompiledParts | None:
        floats = layout.floats()
        return next((compiled for compiled in self._compiled.get(key, ()) if compiled.serves(floats)), None)

    def _compile(self, optimizer: torch.optim.Optimizer, layout: Layout, options: StepOptions) -> CompiledParts:
        key = options, layout.key()
        if layout.counted and len(self._compiled.get(key, ())) == MOST_COUNTED_PROGRAMS:
            names = ", ".join(sorted(layout.counted))
            raise NotCompilableError(f"its step changes with the count {names} of its groups")
        self.compilations += 1
        if self.compilations == MANY_COMPILATIONS:
            log.warning(
                "%s: its step was compiled %d times, because a setting or a gradient changed each time; "
                'skip="host" compiles nothing',
                type(optimizer).__name__,
                self.compilations,
            )
        compiled = compile_parts(optimizer, layout, options)
        self._compiled.setdefault(key, []).append(compiled)
        return compiled

    def _log_once(self, optimizer: torch.optim.Optimizer, why: str, consequence: str) -> None:
        if why not in self.reasons:
            self.reasons += (why,)
            log.warning("%s: %s: %s", type(optimizer).__name__, consequence, why)


def _saved(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Return the saved state as the uncompiled optimizer would save it."""
    compiled = CompiledOptimizer.known(optimizer)
    numbers = {} if compiled is None else compiled.numbers
    return {**saved, "state": plain_state(saved, numbers)}


_compiled: "weakref.WeakKeyDictionary[torch.optim.Optimizer, CompiledOptimizer]" = weakref.WeakKeyDictionary()
_creating = RLock()


def backward_steps(parameters: Collection[Tensor]) -> list[BackwardStep | None]:
    """Return the BackwardStep of each of ``parameters``; None for one that no backward steps.

    This reads the param_groups of all optimizers that step in backwards, so call it once per backward. Raises
    OptionError if two of them have one of ``parameters``.
    """
    asked = list(map(id, parameters))
    found: dict[int, BackwardStep | None] = dict.fromkeys(asked)
    for optimizer, compiled in list(_compiled.items()):
        step = compiled.backward_step
        for parameter in () if step is None else optimized_parameters(optimizer):
            if id(parameter) in found:
                if found[id(parameter)] not in (None, step):
                    raise OptionError(
                        f"{subject(optimizer)}, and another optimizer with in_backward has some of its parameters"
                    )
                found[id(parameter)] = step
    return [found[key] for key in asked]


def require_no_backward_steps(optimizer: torch.optim.Optimizer) -> None:
    """Raise OptionError if backwards step the optimizer's parameters, as a scaler would unscale and check too late."""
    compiled = CompiledOptimizer.known(optimizer)
    if compiled is not None and compiled.backward_step is not None:
        raise OptionError(f"{subject(optimizer)}, and a scaler decides after the backward; accepted: only one of them")
