"""Compile one layout's step: a part for each set of kinds that share a program, and one for all other parameters."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from fxamp.devices import NO_FLOAT64
from fxamp.kernels.gradient_request import Tables
from fxamp.optim.errors import NotCompilableError
from fxamp.optim.grouping.parameter_kinds import ParameterKind, SortedParameters, sort_parameters
from fxamp.optim.grouping.shared_programs import ProgramUse, group_by_program
from fxamp.optim.precision.state_precision import packed_state, pass_for, require_names
from fxamp.optim.precision.state_signs import state_signs
from fxamp.optim.programs.kind_step import KindStep, lower_kinds
from fxamp.optim.programs.lowering import StepOptions, WholeStep, decompositions, lower_step, must_lift
from fxamp.optim.reading.layout import Layout
from fxamp.optim.tracing.stand_ins import Counts
from fxamp.optim.tracing.trace import (
    Traced,
    changes_nothing,
    fakes_of,
    flat_fakes,
    run_once,
    run_without_values,
    trace_step,
    wide_fakes,
)
from fxamp.passes.step.lift_scalars import liftable, unliftable_inputs

log = logging.getLogger(__name__)

Part = WholeStep | KindStep


@dataclass(frozen=True, eq=False)
class CompiledParts:
    """A layout's compiled step: one part for kinds that share a program, and one for parameters that have no kind.

    ``counts``: the settings to which the step adds one, which the host does. ``tables``: the cache of the kernels that
    compute the norm of its gradients.
    """

    parts: tuple[Part, ...]
    counts: Counts = frozenset()
    tables: Tables = field(default_factory=Tables)

    def serves(self, floats: Sequence[float]) -> bool:
        """Whether all programs are valid for these settings."""
        return all(part.serves(floats) for part in self.parts)

    @cached_property
    def launches(self) -> bool:
        """Whether a part can repeat its last launch if none of the layout's tensors has moved."""
        return any(part.launches for part in self.parts)

    @cached_property
    def writes_gradients(self) -> bool:
        """Whether the step changes gradients in place."""
        return any(part.traced.writes_gradients for part in self.parts)

    def __call__(
        self,
        tensors: Sequence[Tensor],
        floats: Sequence[float],
        extras: Sequence[Tensor],
        addresses: list[int] | None = None,
    ) -> None:
        """Step.

        Args:
            tensors, floats: the layout's.
            extras: the factors and the flag.
            addresses: where each of the tensors starts, if a part :attr:`launches`; else None.
        """
        for part in self.parts:
            part(tensors, floats, extras, addresses)


def compile_parts(optimizer: torch.optim.Optimizer, layout: Layout, options: StepOptions) -> CompiledParts:
    """Trace and compile the step of ``layout``; raises NotCompilableError or MakesStateError if that is impossible."""
    counts: Counts = frozenset()
    if layout.counted:
        tensors, floats = layout.tensors(), layout.floats()
        counts = run_without_values(tensors, lambda fakes: run_once(optimizer, layout, fakes, floats)).counts
    if counts and options.guarded:
        raise NotCompilableError(
            "its step counts in its param_groups, on the host, which does not know if it is skipped"
        )
    compiled = CompiledParts(tuple(_parts(optimizer, layout, options)), counts)
    if compiled.writes_gradients and layout.wholes:
        raise NotCompilableError("its step writes to gradients, which are DTensors")
    return compiled


def pack_state(optimizer: torch.optim.Optimizer, layout: Layout, options: StepOptions) -> tuple[bool, tuple[str, ...]]:
    """Pack the state as the policy says. Return whether there was anything to pack, and why some state is not packed.

    Raises NotCompilableError if the policy names a state that the optimizer does not have.
    """
    precision = options.precision
    if precision is None:
        return False, ()
    require_names(layout, precision.table)
    parameters, changed = _sorted(optimizer, layout), False
    for kind in parameters.kinds:
        first = layout.only(kind.members[:1])
        traced = best_trace(optimizer, first, StepOptions(guarded=False, lowering="aot_eager"), wide_fakes, lifted=())
        new = packed_state(layout, kind.members, precision.table, state_signs(traced.module))
        for owner, entry in new.items():
            whole = {name: layout.kept_by(owner, value) if value.dim() else value for name, value in entry.items()}
            optimizer.state[layout.owner_of(owner)].update(whole)
        changed |= bool(new)
    return changed, tuple(parameters.others)


def _parts(optimizer: torch.optim.Optimizer, layout: Layout, options: StepOptions) -> Iterator[Part]:
    """Yield the step of the kinds that share a program, then one step for the parameters that belong to none."""
    parameters = _sorted(optimizer, layout)
    kinds = []
    for kind in parameters.kinds:
        try:
            use = _program_alone(optimizer, layout, kind, options)
        except NotCompilableError as error:
            parameters.exclude(kind.members, str(error))
            continue
        if changes_nothing(use.traced.module):
            yield _idle(use.traced)
        else:
            kinds.append(use)
    for uses in group_by_program(kinds, layout):
        try:
            step = _kind_step(layout, uses, options)
        except NotCompilableError as error:
            parameters.exclude((at for use in uses for at in use.kind.members), str(error))
        else:
            yield step
    name, others = type(optimizer).__name__, parameters.others
    for why, members in others.items():
        log.info("%s: %d of %d parameters do not share a program: %s", name, len(members), len(layout.parameters), why)
    rest = sorted(at for members in others.values() for at in members)
    if any(layout.is_split(at) for at in rest):
        why = next(iter(others))
        raise NotCompilableError(f"some parameters are shards, on which only an elementwise step is right: {why}")
    if rest:
        own = layout.only(rest)
        index = {id(tensor): place for place, tensor in enumerate(layout.tensors())}
        traced = best_trace(optimizer, own, options)
        places = [index[id(t)] for t in own.tensors()]
        yield _idle(traced) if changes_nothing(traced.module) else lower_step(traced, options, places)


def _idle(traced: Traced) -> WholeStep:
    """Return the step of parameters that the optimizer leaves as they are with settings for which the trace serves."""
    return WholeStep(lambda *_: None, traced, ())


def _program_alone(
    optimizer: torch.optim.Optimizer, layout: Layout, kind: ParameterKind, options: StepOptions
) -> ProgramUse:
    precision, first = options.precision, kind.members[0]
    packed = None if precision is None else pass_for(layout, first, precision.table)
    fakes = wide_fakes if packed is not None else flat_fakes
    use = ProgramUse(kind, best_trace(optimizer, layout.only((first,)), options, fakes), packed)
    if packed is not None and use.traced.writes_gradients:
        raise NotCompilableError("it writes to its gradient, which is not stored in fewer bits")
    return use


def _kind_step(layout: Layout, uses: Sequence[ProgramUse], options: StepOptions) -> KindStep:
    places, tensors = layout.places(), layout.tensors()
    step = lower_kinds(uses, options, places, tensors)
    for use in uses:
        step.require_inputs([tensors[place] for place in places[use.kind.members[0]]])
    return step


def _sorted(optimizer: torch.optim.Optimizer, layout: Layout) -> SortedParameters:
    active = [at for at, gradient in enumerate(layout.gradients) if gradient is not None]
    try:
        parameters = sort_parameters(optimizer, layout)
    except NotCompilableError as error:
        return SortedParameters([], {str(error): active})
    if any("other parameters" in why for why in parameters.others):
        # Parameters that one program updates must not be read by another program.
        return SortedParameters([], dict.fromkeys(list(parameters.others)[:1], active))
    return parameters


def best_trace(
    optimizer: torch.optim.Optimizer,
    layout: Layout,
    options: StepOptions,
    fakes: Callable[..., list[Tensor]] = fakes_of,
    lifted: Sequence[int] | None = None,
) -> Traced:
    """Return the best trace that works: with floats as inputs, else constants; with float64 counters, else float32."""
    why = NotCompilableError("its step reads values on the host")
    wides = (True, False) if layout.parameters[0].device.type not in NO_FLOAT64 else (False,)
    every = tuple(range(len(layout.floats()))) if lifted is None else tuple(lifted)
    # A kind's graph is decomposed when it is passed to Inductor.
    table = decompositions(options) if fakes is fakes_of else {}
    for lifted, wide in product(dict.fromkeys([every, ()]), wides):
        try:
            traced = trace_step(optimizer, layout, lifted, wide, table, fakes)
            stuck = unliftable_inputs(traced.module) if must_lift(traced.module, options) else ()
            if stuck:
                free = [at for at in every if at not in stuck]
                traced = trace_step(optimizer, layout, free, wide, table, fakes)
        except NotCompilableError as error:
            log.debug("not traced with floats %s as inputs, wide=%s: %s", lifted, wide, error)
            why = error
            continue
        if not layout.counted_places() <= set(traced.lifted):
            names = ", ".join(sorted(layout.counted))
            why = NotCompilableError(f"no op on tensors computes what it computes from the count {names} of its groups")
        elif not must_lift(traced.module, options) or liftable(traced.module):
            return traced
    raise why
