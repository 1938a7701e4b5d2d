"""One optimizer's step, compiled once, which a flag on the device can skip."""

import logging
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fxamp.devices import NO_FLOAT64
from fxamp.optim.borrow import (
    MakesStateError,
    RefusedError,
    needs_arguments,
    replaced_step,
    wrapped_optimizer,
)
from fxamp.optim.complete import complete_state
from fxamp.optim.kind_step import KindStep, lower_kinds
from fxamp.optim.kinds import Kind, Split, split
from fxamp.optim.layout import Layout, gradients_of, quick_key, read_layout, settings_of
from fxamp.optim.lower import StepOptions, WholeStep, decompositions, lower_step, must_lift
from fxamp.optim.precision import pass_for, precision_of, require_names, require_whole, store
from fxamp.optim.share import Share, shared
from fxamp.optim.signs import never_negative
from fxamp.optim.state_dicts import plain_entry
from fxamp.optim.trace import Traced, fakes_of, flat_fakes, trace_step, wide_fakes
from fxamp.passes.step.lift_scalars import liftable, unliftable_inputs
from fxamp.torch_private import note_step, step_post_hooks, step_pre_hooks

log = logging.getLogger(__name__)

MANY_COMPILATIONS = 9
"""The number of compilations at which to warn: one more than torch.compile's recompile_limit."""
MOST_MAKING = 16
"""Kinds of steps that create state before the user is told: experts that get their first gradient late are normal."""

Part = WholeStep | KindStep


@dataclass(frozen=True, eq=False)
class CompiledParts:
    """A layout's compiled step: one part for kinds that share a program, and one for parameters that have no kind."""

    parts: tuple[Part, ...]

    def serves(self, floats: Sequence[float]) -> bool:
        """Whether all programs are valid for these settings."""
        return all(part.serves(floats) for part in self.parts)

    def __call__(self, tensors: Sequence[Tensor], floats: Sequence[float], extras: Sequence[Tensor]) -> None:
        """Step; ``tensors`` and ``floats`` are the layout's, ``extras`` are the factors and the flag."""
        for part in self.parts:
            part(tensors, floats, extras)


@dataclass(frozen=True)
class Factors:
    """The factors that a step multiplies gradients by as it reads them: 0-dim float32 tensors, or None."""

    inv_scale: Tensor | None = None
    coefficient: Tensor | None = None

    def given(self) -> list[Tensor]:
        """Return the factors that are not None, in the compiled step's order."""
        return [factor for factor in (self.inv_scale, self.coefficient) if factor is not None]


@dataclass(frozen=True, eq=False)
class _LastStep:
    """The last step with the same options; the next one reuses its layout if the quick key is equal."""

    quick_key: Any
    layout: Layout
    floats: list[float]
    compiled: CompiledParts


class GuardedStep:
    """Compiles and runs one optimizer's step, without waiting for the device.

    The step is compiled again when a property that it was compiled for changes: another parameter has a gradient, a
    group was added, ``weight_decay`` became nonzero. The optimizer still owns its settings, state and ``state_dict``. A
    step that creates state, as an optimizer's first step does, is left to the host: either the optimizer runs it, or
    nothing is created.

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
        """Return the step, ready to run, compiling it if necessary; None if the host must decide.

        The host decides on the first step, which creates the optimizer's state, and on steps that cannot be compiled.
        The log says why, once.

        Args:
            scaled, clipped: which factors the step will be given.
            arguments: whether the step is called with arguments, such as a closure, which only the host can call.
            guarded: whether the step will be given a flag that can skip it.
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
        """Why the host had to decide, each reason once, in order of occurrence."""
        return tuple(self._said)

    def _prepare(self, optimizer: torch.optim.Optimizer, options: StepOptions) -> "BoundStep":
        seen = quick_key(optimizer)
        last = self._last.get(options)
        if last is not None and last.quick_key == seen:
            layout = replace(last.layout, gradients=gradients_of(last.layout.owners), settings=settings_of(optimizer))
            floats = layout.floats()
            if floats == last.floats or last.compiled.serves(floats):
                return self._bind(optimizer, last.compiled, layout)
        layout = read_layout(optimizer)
        key = (options, layout.key())
        found = self._find(key, layout)
        if found is None:
            layout, found = self._compile_once(optimizer, layout, options, key)
        # Drop the gradients; otherwise they would stay alive after the user drops them.
        self._last[options] = _LastStep(quick_key(optimizer), replace(layout, gradients=[]), layout.floats(), found)
        return self._bind(optimizer, found, layout)

    def _compile_once(
        self, optimizer: torch.optim.Optimizer, layout: Layout, options: StepOptions, key: Hashable
    ) -> tuple[Layout, CompiledParts]:
        """Complete the state and compile; a step that failed to compile is not tried again."""
        if key in self._refused:
            raise RefusedError(self._refused[key])
        if key in self._making:
            raise MakesStateError("it makes its state")
        try:
            if self._complete(optimizer, layout):
                layout = read_layout(optimizer)
            if self._store(optimizer, layout, options):
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
        return BoundStep(optimizer, compiled, layout)

    def _find(self, key: Hashable, layout: Layout) -> CompiledParts | None:
        floats = layout.floats()
        return next((each for each in self._compiled.get(key, ()) if each.serves(floats)), None)

    def _complete(self, optimizer: torch.optim.Optimizer, layout: Layout) -> bool:
        """Replace the numbers in the state that the step changes by tensors; whether there were any."""
        changes = complete_state(optimizer, layout)
        for owner, entry in changes.items():
            optimizer.state[layout.owner_of(owner)].update(entry)
        return bool(changes)

    def _compile(self, optimizer: torch.optim.Optimizer, layout: Layout, options: StepOptions) -> CompiledParts:
        self.compilations += 1
        if self.compilations == MANY_COMPILATIONS:
            log.warning(
                "%s: its step was compiled %d times, because a setting or a gradient changed each time; "
                'skip="host" compiles nothing',
                type(optimizer).__name__,
                self.compilations,
            )
        compiled = CompiledParts(tuple(self._parts(optimizer, layout, options)))
        self._compiled.setdefault((options, layout.key()), []).append(compiled)
        return compiled

    def _parts(self, optimizer: torch.optim.Optimizer, layout: Layout, options: StepOptions) -> Iterator[Part]:
        """Yield the step of the kinds that share a program, then one step for the parameters that belong to none."""
        found = self._split(optimizer, layout, options)
        kinds = []
        for kind in found.kinds:
            try:
                kinds.append(self._alone(optimizer, layout, kind, options))
            except RefusedError as refused:
                for at in kind.members:
                    found.exclude(at, str(refused))
        for shares in shared(kinds, layout):
            try:
                step = self._together(optimizer, layout, shares, options)
            except RefusedError as refused:
                for at in (at for share in shares for at in share.kind.members):
                    found.exclude(at, str(refused))
            else:
                yield step
        for why, members in found.others.items():
            log.info(
                "%s: %d of %d parameters do not share a program: %s",
                type(optimizer).__name__,
                len(members),
                len(layout.parameters),
                why,
            )
        rest = sorted(at for members in found.others.values() for at in members)
        if any(layout.is_split(at) for at in rest):
            why = next(iter(found.others))
            raise RefusedError(f"some parameters are shards, on which only an elementwise step is right: {why}")
        if rest:
            own = layout.only(rest)
            index = {id(tensor): place for place, tensor in enumerate(layout.tensors())}
            traced = self._trace(optimizer, own, options)
            yield WholeStep(lower_step(traced, options), tuple(index[id(tensor)] for tensor in own.tensors()))

    def _alone(self, optimizer: torch.optim.Optimizer, layout: Layout, kind: Kind, options: StepOptions) -> Share:
        precision, first = precision_of(optimizer), kind.members[0]
        packed = None if precision is None else pass_for(layout, first, precision.asked)
        fakes = wide_fakes if packed is not None else flat_fakes
        return Share(kind, self._trace(optimizer, layout.only((first,)), options, fakes), packed)

    def _together(
        self, optimizer: torch.optim.Optimizer, layout: Layout, shares: Sequence[Share], options: StepOptions
    ) -> KindStep:
        places, tensors = layout.places(), layout.tensors()
        step = lower_kinds(shares, options, places, precision_of(optimizer))
        for share in shares:
            step.require_inputs([tensors[place] for place in places[share.kind.members[0]]])
        return step

    def _store(self, optimizer: torch.optim.Optimizer, layout: Layout, options: StepOptions) -> bool:
        """Pack the state as the policy asks; whether there was anything to pack."""
        precision = precision_of(optimizer)
        if precision is None:
            return False
        require_names(layout, precision.asked)
        require_whole(layout)
        found, changed = self._split(optimizer, layout, options), False
        for kind in found.kinds:
            first = layout.only(kind.members[:1])
            plain = StepOptions(guarded=False, lowering="aot_eager")
            traced = self._trace(optimizer, first, plain, wide_fakes, lifted=())
            changed |= store(layout, kind.members, precision.asked, never_negative(traced.module))
        for why in found.others:
            self._say(optimizer, f"the state of some parameters stays as it is: {why}")
        return changed

    def _split(self, optimizer: torch.optim.Optimizer, layout: Layout, options: StepOptions) -> Split:
        active = [at for at, gradient in enumerate(layout.gradients) if gradient is not None]
        if options.mode is not None:
            return Split([], {f"mode={options.mode!r} is Inductor's, for the step as a whole": active})
        try:
            found = split(optimizer, layout)
        except RefusedError as refused:
            return Split([], {str(refused): active})
        if any("other parameters" in why for why in found.others):
            # Parameters that one program updates must not be read by another program.
            return Split([], dict.fromkeys(list(found.others)[:1], active))
        return found

    def _trace(
        self,
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        options: StepOptions,
        fakes: Callable[..., list[Tensor]] = fakes_of,
        lifted: Sequence[int] | None = None,
    ) -> Traced:
        """Return the best possible trace: floats as inputs, else constants; float64 counters, else float32."""
        why = RefusedError("its step reads values on the host")
        wides = (True, False) if layout.parameters[0].device.type not in NO_FLOAT64 else (False,)
        every = tuple(range(len(layout.floats()))) if lifted is None else tuple(lifted)
        # A kind's graph is decomposed where it is given to Inductor.
        table = decompositions(options) if fakes is fakes_of else {}
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
        """Return the saved state as the uncompiled optimizer would save it."""
        groups = {at: packed for packed in saved["param_groups"] for at in packed["params"]}
        state = {at: plain_entry(entry, groups.get(at, {})) for at, entry in saved["state"].items()}
        return {**saved, "state": state}


class BoundStep:
    """A compiled step with the tensors and settings that it runs on."""

    def __init__(self, optimizer: torch.optim.Optimizer, run: CompiledParts, layout: Layout) -> None:
        self._optimizer, self._run = optimizer, run
        self._tensors, self._floats = layout.tensors(), layout.floats()
        self._written = layout.with_gradients()

    def __call__(self, found_inf: Tensor | None, factors: Factors) -> None:
        """Step unless ``found_inf`` (0-dim float32 on the parameters' device) is nonzero; calls the step's hooks.

        ``found_inf`` is None for a step that is not guarded. Hooks are called for skipped steps too, because the host
        does not know that the step is skipped. Raises RuntimeError if a pre-hook gives the step arguments: a compiled
        step takes none.
        """
        optimizer = self._optimizer
        precision = precision_of(optimizer)
        if precision is not None:
            precision.steps += 1
        for hook in step_pre_hooks(optimizer):
            result: Any = hook(optimizer, (), {})
            if result is not None and result != ((), {}):
                raise RuntimeError(
                    f"a pre-hook passed arguments to the step, but a compiled step takes none: {result!r}"
                )
        self._run(self._tensors, self._floats, [*factors.given(), *([] if found_inf is None else [found_inf])])
        # Generated code writes through addresses. Tell autograd, which refuses a backward through changed weights.
        torch.autograd.graph.increment_version(self._written)
        for post in step_post_hooks(optimizer):
            post(optimizer, (), {})
        note_step(optimizer)


def has_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks run just before the step: they must find unscaled gradients."""
    return bool(step_pre_hooks(optimizer))


def _call(own: "weakref.ref[GuardedStep]", method: Callable[..., Any], *args: Any) -> Any:
    step = own()
    return None if step is None else method(step, *args)
