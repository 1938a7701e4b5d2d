"""One optimizer's step, compiled once, that a flag on the device can turn into no step at all."""

import logging
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fxamp.optim.borrow import (
    MakesStateError,
    RefusedError,
    needs_arguments,
    replaced_step,
    wrapped_optimizer,
)
from fxamp.optim.complete import complete_state
from fxamp.optim.kind_step import KindStep, lower_kind
from fxamp.optim.kinds import Split, split
from fxamp.optim.layout import Layout, quick_key, read_layout, settings_of
from fxamp.optim.lower import StepOptions, WholeStep, decompositions, lower_step, must_lift
from fxamp.optim.state_dicts import plain_entry
from fxamp.optim.trace import Traced, fakes_of, flat_fakes, trace_step
from fxamp.passes.step.lift_scalars import liftable, unliftable_inputs
from fxamp.targets import NO_FLOAT64
from fxamp.torch_private import note_step, step_post_hooks, step_pre_hooks

log = logging.getLogger(__name__)

MANY_COMPILATIONS = 9
"""As many as torch.compile allows one function before it gives up (its recompile_limit), and one more."""
MOST_MAKING = 16
"""Kinds of steps that make state, after which the user is told: experts that come one by one are no fault."""

Part = WholeStep | KindStep


@dataclass(frozen=True, eq=False)
class CompiledParts:
    """A layout's step: that of each kind, and that of the parameters that are of none."""

    parts: tuple[Part, ...]

    def serves(self, floats: Sequence[float]) -> bool:
        """Whether all programs are those of these settings."""
        return all(part.serves(floats) for part in self.parts)

    def __call__(self, tensors: Sequence[Tensor], floats: Sequence[float], extras: Sequence[Tensor]) -> None:
        """Step; ``tensors`` and ``floats`` are the layout's, ``extras`` the factors and the flag."""
        for part in self.parts:
            part(tensors, floats, extras)


@dataclass(frozen=True)
class Factors:
    """What a step's gradients are multiplied by as they are read: 0-dim float32 tensors, None for nothing."""

    inv_scale: Tensor | None = None
    coefficient: Tensor | None = None

    def given(self) -> list[Tensor]:
        """The factors that there are, in the compiled step's order."""
        return [factor for factor in (self.inv_scale, self.coefficient) if factor is not None]


@dataclass(frozen=True, eq=False)
class _LastStep:
    """The last step with the same options; if the next one has the same quick key, it reuses this one's layout."""

    quick_key: Any
    layout: Layout
    floats: list[float]
    compiled: CompiledParts


class GuardedStep:
    """Compiles and runs one optimizer's step, without waiting for the device.

    A step is compiled again where what it reads has changed its kind: another parameter has a gradient, a group was
    added, ``weight_decay`` became nonzero. The optimizer's settings, state and ``state_dict`` stay its own. A step that
    makes state, as an optimizer's first one does, is left to the host: the optimizer takes it, or nothing is made.

    Args:
        optimizer: is not kept alive.
        lowering: "inductor", or "aot_eager" to run the graph op by op.
        mode: one of Inductor's modes, or None.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, lowering: str = "inductor", mode: str | None = None) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._lowering, self._mode = lowering, mode
        self._compiled: dict[Hashable, list[CompiledParts]] = {}
        self._refused: dict[Hashable, str] = {}
        self._making: set[Hashable] = set()
        self._last: dict[StepOptions, _LastStep] = {}
        self._said: list[str] = []
        self._needs_arguments = needs_arguments(optimizer)
        self.compilations = 0
        own = weakref.ref(self)
        optimizer.register_state_dict_post_hook(lambda o, saved: _call(own, GuardedStep._saved, o, saved))

    def prepare(self, scaled: bool, clipped: bool, arguments: bool = False, guarded: bool = True) -> "BoundStep | None":
        """Make ready to step: compile if need be. None where the host has to decide: the first step, which makes the
        optimizer's state, and steps that cannot be compiled; why is logged, once.

        Args:
            scaled, clipped: which factors the step will be given.
            arguments: whether the step is called with any: a closure, which only the host can call.
            guarded: whether it will be given a flag that can skip it.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        try:
            if arguments or self._needs_arguments:
                raise RefusedError("its step is called with a closure or other arguments")
            if replaced_step(optimizer):
                raise RefusedError("its step was replaced by another function")
            inner = wrapped_optimizer(optimizer)
            if inner is not None:
                raise RefusedError(f"its step calls that of another optimizer, {type(inner).__name__}")
            return self._prepare(optimizer, StepOptions(scaled, clipped, guarded, self._lowering, self._mode))
        except MakesStateError as made:
            log.debug("%s: the host decides on this step: %s", type(optimizer).__name__, made)
        except RefusedError as refused:
            self._say(optimizer, str(refused))
        return None

    @property
    def refusals(self) -> tuple[str, ...]:
        """Why the host had to decide, each reason once, in the order in which they came up."""
        return tuple(self._said)

    def _prepare(self, optimizer: torch.optim.Optimizer, options: StepOptions) -> "BoundStep":
        seen = quick_key(optimizer)
        last = self._last.get(options)
        if last is not None and last.quick_key == seen:
            layout = replace(
                last.layout, gradients=[p.grad for p in last.layout.parameters], settings=settings_of(optimizer)
            )
            floats = layout.floats()
            if floats == last.floats or last.compiled.serves(floats):
                return self._bind(optimizer, last.compiled, layout)
        layout = read_layout(optimizer)
        key = (options, layout.key())
        found = self._find(key, layout)
        if found is None:
            layout, found = self._compile_once(optimizer, layout, options, key)
        # Without the gradients, which would live on where the user drops them.
        self._last[options] = _LastStep(quick_key(optimizer), replace(layout, gradients=[]), layout.floats(), found)
        return self._bind(optimizer, found, layout)

    def _compile_once(
        self, optimizer: torch.optim.Optimizer, layout: Layout, options: StepOptions, key: Hashable
    ) -> tuple[Layout, CompiledParts]:
        """Complete the state and compile; what cannot be compiled is not tried again."""
        if key in self._refused:
            raise RefusedError(self._refused[key])
        if key in self._making:
            raise MakesStateError("it makes its state")
        try:
            if self._complete(optimizer, layout):
                layout = read_layout(optimizer)
            return layout, self._find((options, layout.key()), layout) or self._compile(optimizer, layout, options)
        except RefusedError as refused:
            self._refused[key] = str(refused)
            raise
        except MakesStateError:
            self._making.add(key)
            if len(self._making) > MOST_MAKING:
                self._say(optimizer, "its steps make new state again and again")
            raise

    def _bind(self, optimizer: torch.optim.Optimizer, compiled: CompiledParts, layout: Layout) -> "BoundStep":
        return BoundStep(optimizer, compiled, layout.tensors(), layout.floats())

    def _find(self, key: Hashable, layout: Layout) -> CompiledParts | None:
        floats = layout.floats()
        return next((each for each in self._compiled.get(key, ()) if each.serves(floats)), None)

    def _complete(self, optimizer: torch.optim.Optimizer, layout: Layout) -> bool:
        """Make tensors of what the step changes in the state; whether there was any."""
        changes = complete_state(optimizer, layout)
        for owner, entry in changes.items():
            optimizer.state[owner].update(entry)
        return bool(changes)

    def _compile(self, optimizer: torch.optim.Optimizer, layout: Layout, options: StepOptions) -> CompiledParts:
        self.compilations += 1
        if self.compilations == MANY_COMPILATIONS:
            log.warning(
                "%s: its step was compiled %d times, as a setting or a gradient changed its kind each time; "
                'skip="host" compiles nothing',
                type(optimizer).__name__,
                self.compilations,
            )
        compiled = CompiledParts(tuple(self._parts(optimizer, layout, options)))
        self._compiled.setdefault((options, layout.key()), []).append(compiled)
        return compiled

    def _parts(self, optimizer: torch.optim.Optimizer, layout: Layout, options: StepOptions) -> Iterator[Part]:
        """The step of each kind, then that of the parameters of none, as a whole."""
        places = layout.places()
        found = self._split(optimizer, layout, options)
        for kind in found.kinds:
            try:
                traced = self._trace(optimizer, layout.only(kind.members[:1]), options, flat=True)
                step = lower_kind(traced, options, [places[at] for at in kind.members])
            except RefusedError as refused:
                for at in kind.members:
                    found.exclude(at, str(refused))
            else:
                yield step
        for why, members in found.others.items():
            log.info(
                "%s: %d of %d parameters have no program of their own: %s",
                type(optimizer).__name__,
                len(members),
                len(layout.parameters),
                why,
            )
        rest = sorted(at for members in found.others.values() for at in members)
        if rest:
            own = layout.only(rest)
            index = {id(tensor): place for place, tensor in enumerate(layout.tensors())}
            traced = self._trace(optimizer, own, options)
            yield WholeStep(lower_step(traced, options), tuple(index[id(tensor)] for tensor in own.tensors()))

    def _split(self, optimizer: torch.optim.Optimizer, layout: Layout, options: StepOptions) -> Split:
        active = [at for at, gradient in enumerate(layout.gradients) if gradient is not None]
        if options.mode is not None:
            return Split([], {f"mode={options.mode!r} is Inductor's, for the step as a whole": active})
        try:
            found = split(optimizer, layout)
        except RefusedError as refused:
            return Split([], {str(refused): active})
        if any("other parameters" in why for why in found.others):
            # What is left out of a program must not be what another one reads.
            return Split([], dict.fromkeys(list(found.others)[:1], active))
        return found

    def _trace(
        self, optimizer: torch.optim.Optimizer, layout: Layout, options: StepOptions, flat: bool = False
    ) -> Traced:
        """The best trace there is: floats as inputs rather than constants, counters in float64 rather than float32."""
        why = RefusedError("its step reads values on the host")
        wides = (True, False) if layout.parameters[0].device.type not in NO_FLOAT64 else (False,)
        every = tuple(range(len(layout.floats())))
        fakes = flat_fakes if flat else fakes_of
        table = decompositions(options, layout.parameters[0].device if flat else None)
        for lifted, wide in product(dict.fromkeys([every, ()]), wides):
            try:
                traced = trace_step(optimizer, layout, lifted, wide, table, fakes)
                stuck = unliftable_inputs(traced.module) if must_lift(traced.module, options) else ()
                if stuck:
                    free = [at for at in every if at not in stuck]
                    traced = trace_step(optimizer, layout, free, wide, table, fakes)
            except RefusedError as refused:
                log.debug("not traced with floats %s as inputs, wide=%s: %s", lifted, wide, refused)
                why = refused
                continue
            if not must_lift(traced.module, options) or liftable(traced.module):
                return traced
        raise why

    def _say(self, optimizer: torch.optim.Optimizer, why: str) -> None:
        if why not in self._said:
            self._said.append(why)
            log.warning(
                "%s: the host decides whether to skip, and waits for the device: %s", type(optimizer).__name__, why
            )

    def _saved(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """The state as the optimizer alone would have it."""
        groups = {at: packed for packed in saved["param_groups"] for at in packed["params"]}
        state = {at: plain_entry(entry, groups.get(at, {})) for at, entry in saved["state"].items()}
        return {**saved, "state": state}


class BoundStep:
    """A compiled step with the tensors and settings that it runs on."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, run: CompiledParts, tensors: Sequence[Tensor], floats: list[float]
    ) -> None:
        self._optimizer, self._run, self._tensors, self._floats = optimizer, run, tensors, floats

    def __call__(self, found_inf: Tensor | None, factors: Factors) -> None:
        """Step unless ``found_inf`` (0-dim float32 on the parameters' device) is nonzero; calls the step's hooks.

        None for a step that is not guarded.

        Hooks are called for skipped steps too: the host does not know. Raises RuntimeError if a hook changes the
        step's arguments: there are none.
        """
        optimizer = self._optimizer
        for hook in step_pre_hooks(optimizer):
            result: Any = hook(optimizer, (), {})
            if result is not None and result != ((), {}):
                raise RuntimeError(
                    f"a pre-hook gave the step arguments, which a compiled step does not take: {result!r}"
                )
        self._run(self._tensors, self._floats, [*factors.given(), *([] if found_inf is None else [found_inf])])
        for post in step_post_hooks(optimizer):
            post(optimizer, (), {})
        note_step(optimizer)


def has_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether something looks at the gradients just before the step: it has to find true ones."""
    return bool(step_pre_hooks(optimizer))


def _call(own: "weakref.ref[GuardedStep]", method: Callable[..., Any], *args: Any) -> Any:
    step = own()
    return None if step is None else method(step, *args)
