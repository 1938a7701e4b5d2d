"""One optimizer's step, compiled once, that a flag on the device can turn into no step at all."""

import logging
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fxamp.optim.borrow import RefusedError, replaced_step
from fxamp.optim.complete import complete_state
from fxamp.optim.layout import SAME, Layout, Origin, glance, read_layout, settings_of
from fxamp.optim.lower import Lowered, Wish, decompositions, lower_step, must_lift
from fxamp.optim.state_dicts import plain_entry
from fxamp.optim.trace import Traced, trace_step
from fxamp.passes.lift_scalars import liftable

log = logging.getLogger(__name__)

NO_FLOAT64 = frozenset({"mps"})

Compiled = tuple[Traced, Lowered]


@dataclass(frozen=True)
class Factors:
    """What a step's gradients are multiplied by as they are read: 0-dim float32 tensors, None for nothing."""

    inv_scale: Tensor | None = None
    coefficient: Tensor | None = None

    def given(self) -> list[Tensor]:
        """The factors that there are, in the compiled step's order."""
        return [factor for factor in (self.inv_scale, self.coefficient) if factor is not None]


@dataclass(frozen=True, eq=False)
class _Last:
    """What the last step of one kind was: as long as it looks the same at a glance, the next is the same."""

    seen: Any
    layout: Layout
    floats: list[float]
    compiled: Compiled


class GuardedStep:
    """Compiles and runs one optimizer's step, without waiting for the device.

    A step is compiled again where what it reads has changed its kind: another parameter has a gradient, a group was
    added, ``weight_decay`` became nonzero. The optimizer's settings, state and ``state_dict`` stay its own: its state
    is written in place, and an entry whose first step was skipped does not show in ``state_dict``.

    Args:
        optimizer: is not kept alive.
        lowering: "inductor", or "aot_eager" to run the graph op by op.
        mode: one of Inductor's modes, or None.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, lowering: str = "inductor", mode: str | None = None) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._lowering, self._mode = lowering, mode
        self._pending: dict[Any, Origin] = {}
        self._born: Tensor | None = None
        self._compiled: dict[Hashable, list[Compiled]] = {}
        self._refused: dict[Hashable, str] = {}
        self._last: dict[Wish, _Last] = {}
        self._said: list[str] = []
        self.compilations = 0
        own = weakref.ref(self)
        optimizer.register_state_dict_post_hook(lambda o, saved: _call(own, GuardedStep._saved, o, saved))
        optimizer.register_load_state_dict_post_hook(lambda o: _call(own, GuardedStep._loaded, o))

    def prepare(self, scaled: bool, clipped: bool, arguments: bool = False) -> "Prepared | None":
        """Make ready to step: compile if need be. None where the host has to decide; why is logged, once.

        Args:
            scaled, clipped: which factors the step will be given.
            arguments: whether the step is called with any: a closure, which only the host can call.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        try:
            if arguments:
                raise RefusedError("its step is called with a closure or other arguments")
            if replaced_step(optimizer):
                raise RefusedError("its step was replaced by another function")
            return self._prepare(optimizer, Wish(scaled, clipped, True, self._lowering, self._mode))
        except RefusedError as refused:
            self._say(optimizer, str(refused))
            self._restore(optimizer)
            return None

    @property
    def refusals(self) -> tuple[str, ...]:
        """Why the host had to decide, each reason once, in the order in which they came up."""
        return tuple(self._said)

    def _prepare(self, optimizer: torch.optim.Optimizer, wish: Wish) -> "Prepared":
        seen = glance(optimizer)
        last = self._last.get(wish)
        if last is not None and last.seen == seen:
            layout = replace(
                last.layout, gradients=[p.grad for p in last.layout.parameters], settings=settings_of(optimizer)
            )
            floats = layout.floats()
            if floats == last.floats or last.compiled[0].serves(floats):
                return self._prepared(optimizer, last.compiled, layout)
        layout = read_layout(optimizer, self._pending)
        key = (wish, layout.key())
        if key in self._refused:
            raise RefusedError(self._refused[key])
        found = self._find(key, layout)
        if found is None:
            try:
                if self._complete(optimizer, layout):
                    layout = read_layout(optimizer, self._pending)
                found = self._find((wish, layout.key()), layout) or self._compile(optimizer, layout, wish)
            except RefusedError as refused:
                self._refused[key] = str(refused)
                raise
        # Without the gradients, which would live on where the user drops them.
        self._last[wish] = _Last(glance(optimizer), replace(layout, gradients=[]), layout.floats(), found)
        return self._prepared(optimizer, found, layout)

    def _prepared(self, optimizer: torch.optim.Optimizer, compiled: Compiled, layout: Layout) -> "Prepared":
        born = [] if not layout.pending or self._born is None else [self._born]
        return Prepared(optimizer, compiled[1], [*layout.tensors(), *born], layout.floats())

    def _find(self, key: Hashable, layout: Layout) -> Compiled | None:
        floats = layout.floats()
        return next((each for each in self._compiled.get(key, ()) if each[0].serves(floats)), None)

    def _complete(self, optimizer: torch.optim.Optimizer, layout: Layout) -> bool:
        """Make the state that the step lacks; whether there was any."""
        changes, origins = complete_state(optimizer, layout)
        if not changes:
            return False
        if self._pending:
            # What is there must be certain before more is made: the one place that waits, and it compiles anyway.
            self._restore(optimizer)
            changes, origins = complete_state(optimizer, read_layout(optimizer, {}))
        for owner, entry in changes.items():
            optimizer.state[owner].update(entry)
        if origins:
            self._pending = origins
            self._born = torch.zeros(len(origins), dtype=torch.bool, device=layout.parameters[0].device)
        self._last.clear()
        return True

    def _compile(self, optimizer: torch.optim.Optimizer, layout: Layout, wish: Wish) -> Compiled:
        self.compilations += 1
        traced = self._trace(optimizer, layout, wish)
        compiled = traced, lower_step(traced, wish)
        self._compiled.setdefault((wish, layout.key()), []).append(compiled)
        return compiled

    def _trace(self, optimizer: torch.optim.Optimizer, layout: Layout, wish: Wish) -> Traced:
        """The best trace there is: floats as inputs rather than baked in, counters in float64 rather than float32."""
        why = RefusedError("its step reads values on the host")
        wides = (True, False) if layout.parameters[0].device.type not in NO_FLOAT64 else (False,)
        for lift, wide in product((True, False) if layout.floats() else (False,), wides):
            try:
                traced = trace_step(optimizer, layout, lift, wide, decompositions(wish))
            except RefusedError as refused:
                log.debug("not traced with lift=%s, wide=%s: %s", lift, wide, refused)
                why = refused
                continue
            if not must_lift(traced.module, wish) or liftable(traced.module):
                return traced if lift else baked(traced, layout.floats())
        raise why

    def _say(self, optimizer: torch.optim.Optimizer, why: str) -> None:
        if why not in self._said:
            self._said.append(why)
            log.warning(
                "%s: the host decides whether to skip, and waits for the device: %s", type(optimizer).__name__, why
            )

    # ---- the optimizer's saved state ----

    def _born_owners(self) -> set[int]:
        """The ids of pending owners whose first step was taken; waits for the device."""
        flags = [] if self._born is None else self._born.tolist()
        return {id(owner) for owner, flag in zip(self._pending, flags, strict=True) if flag}

    def _saved(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """The state as the optimizer alone would have it: entries not born left out, counters where it keeps them."""
        born = self._born_owners()
        positions = {}
        for group, packed in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            positions.update({at: (owner, group) for at, owner in zip(packed["params"], group["params"], strict=True)})
        state = {}
        for at, entry in saved["state"].items():
            owner, group = positions.get(at, (at, {}))
            origin = self._pending.get(owner) if id(owner) not in born else None
            plain = plain_entry(entry, origin, group)
            if plain or origin is None:
                state[at] = plain
        return {**saved, "state": state}

    def _restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Take back the entries that are not born: a step that does not know of them would believe them; waits."""
        born = self._born_owners()
        for owner, origin in self._pending.items():
            if id(owner) in born or owner not in optimizer.state:
                continue
            entry = optimizer.state.pop(owner)
            if origin:
                optimizer.state[owner] = {n: entry[n] if value is SAME else value for n, value in origin.items()}
        self._pending, self._born = {}, None
        self._last.clear()

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Entries that were loaded are there; the next step makes the others."""
        if self._born is not None:
            self._born.fill_(True)


class Prepared:
    """A step that is ready to run."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, run: Lowered, tensors: Sequence[Tensor], floats: list[float]
    ) -> None:
        self._optimizer, self._run, self._tensors, self._floats = optimizer, run, tensors, floats

    def __call__(self, found_inf: Tensor, factors: Factors) -> None:
        """Step unless ``found_inf`` (0-dim float32 on the parameters' device) is nonzero; calls the step's hooks.

        Hooks are called for skipped steps too: the host does not know. Raises RuntimeError if a hook changes the
        step's arguments: there are none.
        """
        optimizer = self._optimizer
        for hook in chain(_global_optimizer_pre_hooks.values(), optimizer._optimizer_step_pre_hooks.values()):
            result: Any = hook(optimizer, (), {})
            if result is not None and result != ((), {}):
                raise RuntimeError(
                    f"a pre-hook gave the step arguments, which a compiled step does not take: {result!r}"
                )
        self._run(self._tensors, self._floats, [*factors.given(), found_inf])
        for post in chain(optimizer._optimizer_step_post_hooks.values(), _global_optimizer_post_hooks.values()):
            post(optimizer, (), {})
        # What schedulers look at, to warn of a wrong order of calls.
        optimizer._opt_called = True  # type: ignore[attr-defined]


def has_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether something looks at the gradients just before the step: it has to find true ones."""
    return bool(_global_optimizer_pre_hooks or optimizer._optimizer_step_pre_hooks)


def baked(traced: Traced, floats: Sequence[float]) -> Traced:
    """``traced``, which serves just these floats."""
    return _Baked(traced.module, traced.mode, (), (), tuple(floats))


@dataclass(frozen=True, eq=False)
class _Baked(Traced):
    floats: tuple[float, ...] = ()

    def serves(self, floats: Sequence[float]) -> bool:
        return tuple(floats) == self.floats


def _call(own: "weakref.ref[GuardedStep]", method: Callable[..., Any], *args: Any) -> Any:
    step = own()
    return None if step is None else method(step, *args)
