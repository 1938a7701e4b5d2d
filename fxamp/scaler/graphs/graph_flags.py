"""The flags of one scaler's compiled graphs: what their backwards reported since the last update."""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fxamp.errors import OptionError
from fxamp.optim.gradients import GradientGroup, Gradients
from fxamp.optim.identity import Identities, next_version
from fxamp.reports.nonfinite import Account
from fxamp.scaler.graphs.distributed_wrappers import require_unscaled_sums
from fxamp.scaler.graphs.flag_table import FlagTable
from fxamp.scaler.scale import Owner
from fxamp.torch_devices import known, moved
from fxamp.torch_private import accumulates, after_backward, compile_options, running_backward, running_node

MOST_SQUARES = 256
"""Maximum number of backwards whose sum of squares is kept, if no update drops them."""

MOST_REPORTS = 4096
"""Number of reports from which on those of one graph are combined, if no update drops them."""


class _Run:
    """One backward of autograd, which runs any number of graphs; or a record made outside of any.

    Attributes:
        began: the version of the first gradients that it recorded. One that is older and unchanged holds nothing of
            this run.
        ended: the version that gradients had reached. One that is newer, or was None at a newer one, holds nothing of
            this run. Infinite while it runs, and for good if it ran inside another, which may hold its results.
        accumulates: whether it is known to add to ``.grad``; autograd.grad() returns its results to the program.
    """

    def __init__(self, running: bool, began: int) -> None:
        self.began, self.ended, self.accumulates, self._inner = began, math.inf, False, False
        if not running:
            self._stop()
            return
        end = partial(_Run._end, self)
        weakref.finalize(end, self._stop)  # autograd drops it without a call if the backward raises
        after_backward(end)

    def note(self, owners: Sequence[Tensor | None]) -> None:
        """Note that a graph of this run computes gradients of ``owners``."""
        if not self.accumulates and self.ended == math.inf:
            self.accumulates = any(accumulates(owner) for owner in owners if owner is not None)

    def _end(self) -> None:
        self._inner = running_node() is not None
        self._stop()

    def _stop(self) -> None:
        if not self._inner:
            self.ended = min(self.ended, next_version())


class _Span(NamedTuple):
    """The versions between which a gradient may have got what it holds; from 0 to infinity if they are unknown."""

    oldest: float
    newest: float


_NOTHING = _Span(math.inf, -math.inf)


class _Backward:
    """Reports of compiled backwards on the gradients of ``owners``.

    Attributes:
        runs: the backwards of autograd that they were part of.
        owners: weak references to the parameters; None for a gradient that belongs to no parameter.
        flags: whether each overflowed, bool or int32 ``[len(owners)]``, in one of these backwards.
    """

    def __init__(self, run: _Run, owners: Sequence[Owner], flags: Tensor) -> None:
        self.runs, self.owners, self.flags = {run}, owners, flags

    def add(self, run: _Run, flags: Tensor) -> None:
        """Add a newer backward for the same owners."""
        self.runs.add(run)
        self.flags = self.flags | flags

    def counting(self, spans: Mapping[int, _Span], everybody: Tensor) -> list[Tensor | None]:
        """Return for each flag the parameter that it counts for, ``everybody``, or None if it does not count.

        ``spans``: of an optimizer's gradients, by the id of the parameter.
        """
        ended = max(run.ended for run in self.runs)
        owners = _living(self.owners)
        held = [own if spans.get(id(own), _NOTHING).oldest <= ended else None for own in owners]
        if None not in self.owners:
            return held
        unowned = everybody if self._reached(spans.values(), ended) else None
        return [unowned if owner is None else own for owner, own in zip(self.owners, held, strict=True)]

    def _reached(self, spans: Iterable[_Span], ended: float) -> bool:
        """Whether a gradient may hold something of these backwards, the last of which has ``ended``."""
        first = min(run.began for run in self.runs)
        last = ended if all(run.accumulates for run in self.runs) else math.inf
        return any(span.oldest <= last and span.newest >= first for span in spans)


def _living(owners: Sequence[Owner]) -> list[Tensor | None]:
    return [None if owner is None else owner() for owner in owners]


#: For each backward: what its flags count for, and the flags.
_Counting = Sequence[tuple[list[Tensor | None], Tensor]]


@dataclass(frozen=True, eq=False)
class Report:
    """Reports of graphs on some of the gradients that a check covers.

    ``parameters``: the owners of the gradients; None for a gradient without a parameter. ``flags``: whether a graph saw
    an overflow in each, bool or int32; None if no graph reported. ``unread``: the positions of gradients that a check
    must read, because they are not exactly as a graph checked them; None if the flags suffice.
    """

    parameters: Sequence[Tensor | None]
    flags: Tensor | None
    unread: list[int] | None = None


class GraphFlags:
    """The flags of one scaler's compiled graphs, and whether it is attached to any.

    Detached, the scaler multiplies losses itself. Attached, compiled backwards scale, unscale, check, and report here.

    Flags are sticky: an overflow in one backward is kept through later backwards, until :meth:`clear`. So one bad
    micro-batch skips the whole accumulated step. If a parameter's gradient is summed from several graphs, it is bad if
    any of them reported an overflow. Flags of gradients that were dropped, as by ``zero_grad()``, do not count, as with
    torch's scaler: a gradient that is exactly as a later backward returned it, or that was None when a later backward
    reported, holds nothing of earlier ones. Flags of gradients set to zero count.

    A clean flag holds only for the gradient as the graph returned it. If the gradient changed since (summed with
    another one, all-reduced by DistributedDataParallel, changed by a hook), it must be checked again. Where there are
    several ranks, every gradient is: a collective, such as a loop's own all-reduce, writes to gradients unseen.

    A gradient that belongs to no parameter flows on into an earlier graph or into eager code. Its flag counts for every
    optimizer that may hold a gradient of that backward, which none does that is unchanged since before it: the overflow
    may be invisible later, for example after a hook that clamps. Parameters outside of graphs may hold one until
    :meth:`clear`. All parameters may if the backward was that of ``torch.autograd.grad()``, or had no graph with a
    parameter. All flags of a backward that runs inside another one, as a reentrant checkpoint's does, count until
    :meth:`clear`.

    Attributes:
        attached: whether compiled backwards scale, unscale and check.
        scaled_losses: whether the scaler has multiplied a loss itself since the last update.
        monitors: those of living graphs with option "nonfinite", by id.
    """

    def __init__(self, scaled_losses: bool = False) -> None:
        self.attached = False
        self.scaled_losses = scaled_losses
        self.monitors: weakref.WeakValueDictionary[int, Account] = weakref.WeakValueDictionary()
        self._backwards: dict[tuple[int, ...], _Backward] = {}
        self._runs: weakref.WeakValueDictionary[int, _Run] = weakref.WeakValueDictionary()
        self._dropped: dict[int, int] = {}
        self._checked = Identities()
        self._squares: dict[int, tuple[int, Tensor]] = {}
        self._tables: dict[torch.device, FlagTable] = {}
        self._everybody = torch.empty(0, device="cpu")
        self._wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()

    # ---- attached or not ----

    def attach(self) -> None:
        """Attach the scaler; later calls do nothing.

        Raises:
            OptionError: the scaler has multiplied a loss itself since the last update.
        """
        if self.scaled_losses and not self.attached:
            raise OptionError(
                "the scaler was given to the backend after it had scaled a loss itself; it would no longer unscale "
                "that loss's gradients. Call update() first, or call attach() right after creating the scaler"
            )
        self.attached = True

    def in_use(self, scaler: object) -> bool:
        """Whether ``scaler``, the owner, is attached; attach it if torch.compile's options hold it.

        So gradients are unscaled even if Dynamo compiles nothing of a model.
        """
        if not self.attached and not self.scaled_losses:
            self.attached = any(options.get("scaler") is scaler for options in compile_options())
        return self.attached

    def note_forward(self, wrapper: DistributedDataParallel) -> None:
        """Remember the DistributedDataParallel whose forward is running: a compiled graph runs inside it."""
        if self.attached:
            self._wrappers.add(wrapper)

    def require_wrappers(self) -> None:
        """Raise UnscaledError if a DistributedDataParallel around a graph sums in float16, or is inside ``join()``."""
        if self._wrappers:
            require_unscaled_sums(self._wrappers)

    # ---- what backwards report ----

    def record(
        self,
        owners: Callable[[], Sequence[Owner]],
        flags: Tensor | None,
        gradients: Sequence[Tensor],
        square: Tensor | None = None,
        dense: bool = False,
    ) -> None:
        """Record what one compiled backward found; waits for no device.

        Args:
            owners: returns for each flag a weak reference to the parameter whose gradient it is, or None for a gradient
                that no parameter owns. Called if a flag may be set, or was.
            flags: bool, or 0 or 1 in int32, ``[len(gradients)]``: whether a gradient holds an inf or NaN. None if the
                host knows that none does.
            gradients: the unscaled gradients, as they are returned to autograd. They are not kept alive. A parameter
                whose ``.grad`` at the step is another tensor, or was written to, is checked again.
            square: the sum of the squares of all these gradients, 0-dim float32; None if unknown.
            dense: whether the caller knows that every gradient :func:`~fxamp.optim.identity.has_identity`.

        Raises:
            OptionError: the scaler is not attached to a backend, or the lengths differ.
        """
        if not self.attached:
            raise OptionError("flags of a graph: call attach() first, so that scale() leaves losses to the graph")
        if flags is not None and flags.shape != (len(gradients),):
            raise OptionError(
                f"flags of a graph: {len(owners())} parameters, {len(gradients)} gradients, flags of shape "
                f"{tuple(flags.shape)}"
            )
        bad = None if flags is None or known(flags) is False else flags
        if bad is None and not self._backwards:
            version = self._checked.note(gradients, None, dense)
        else:
            version = self._record(owners(), bad, gradients, dense)
        if square is not None:
            if len(self._squares) == MOST_SQUARES:
                self._squares.clear()
            self._squares[version] = len(gradients), square

    def _record(
        self, references: Sequence[Owner], flags: Tensor | None, gradients: Sequence[Tensor], dense: bool
    ) -> int:
        """Record a backward, and which of its parameters have no gradient before it; return its version.

        ``flags``: None if the host knows that all gradients are finite.
        """
        living = _living(references)
        version = self._checked.note(gradients, None if flags is None else living, dense)
        if self._backwards:
            none = [id(own) for own in living if own is not None and own.grad is None]
            self._dropped.update(dict.fromkeys(none, version))
        run = self._run(version)
        run.note(living)
        if flags is None:
            return version
        # Reports are combined while no gradient was dropped between them, which is unknown without a parameter.
        drops = (self._dropped.get(id(own), 0) for own in living if own is not None)
        since = max(drops, default=version) if len(self._backwards) < MOST_REPORTS else 0
        key = since, *map(id, references)  # a living tensor has one weak reference, which the report keeps
        earlier = self._backwards.get(key)
        if earlier is None:
            self._backwards[key] = _Backward(run, references, flags)
        else:
            earlier.add(run, flags)
        return version

    def _run(self, version: int) -> _Run:
        """Return the backward of autograd that is running in this thread; ``version``: of what it has computed last."""
        number = running_backward()
        run = self._runs.get(number)
        if run is None or number < 0:
            run = self._runs[number] = _Run(number >= 0, version)
        return run

    # ---- what a check reads ----

    def clean(self, gradients: Gradients) -> bool:
        """Whether the host knows that all backwards were finite, and that they returned ``gradients`` as they are."""
        own = gradients.gradients
        return bool(own) and not self._backwards and not self._changed(own, gradients.parameters)

    def reports(self, group: GradientGroup, trusted: bool) -> list[Report]:
        """Return reports on the gradients of ``group``, with flags on its device.

        Gradients that the host knows to be finite have no report. ``trusted`` False: treat every gradient as changed,
        so that all are read.
        """
        parameters = group.parameters
        trusted = trusted and self.attached
        unread = self._changed(group.as_they_are(), parameters) if trusted else [*range(len(parameters))]
        backwards = self._counting(group, unread) if self._backwards else []
        if not backwards:
            return [Report([parameters[at] for at in unread], None, unread)] if unread else []
        report = None if unread else _whole(backwards, parameters, group.device)
        return [report] if report is not None else self._by_parameter(backwards, parameters, unread, group.device)

    def square(self, gradients: Gradients, device: torch.device) -> Tensor | None:
        """Return the sum of the squares of an optimizer's gradients, 0-dim float32 on ``device``; None if unknown.

        It is known if every gradient is unchanged since a backward returned it, and those backwards returned no others.
        """
        own = gradients.gradients
        if not self._squares or not gradients.plain or self._changed(own, gradients.parameters):
            return None
        squares = []
        for version, count in Counter(gradient._version for gradient in own).items():
            whole, square = self._squares.get(version, (0, None))
            if square is None or count != whole:
                return None
            squares.append(moved(square, device))
        return torch.stack(squares).sum() if squares else None

    def clear(self) -> None:
        """Drop all flags, and the record of which gradients were checked; the scaler stays attached."""
        self._backwards.clear()
        self._dropped.clear()
        self._checked.clear()
        self._squares.clear()
        self.scaled_losses = False

    def _changed(self, gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[int]:
        """Return the positions of the gradients that may not be as a backward returned them."""
        if _several_ranks():
            return [*range(len(parameters))]
        return self._checked.changed(gradients, parameters)

    def _counting(self, group: GradientGroup, unread: Sequence[int]) -> _Counting:
        """Return the flags that count for the gradients of ``group``; those at ``unread`` have changed."""
        versions = (getattr(gradient, "_version", 0) for gradient in group.as_they_are())
        spans = {id(own): _Span(version, version) for own, version in zip(group.parameters, versions, strict=True)}
        changed = (id(group.parameters[at]) for at in unread)
        spans |= {key: _Span(self._dropped.get(key, 0), math.inf) for key in changed}
        counting = [(one.counting(spans, self._everybody), one.flags) for one in self._backwards.values()]
        return [(parameters, flags) for parameters, flags in counting if any(own is not None for own in parameters)]

    def _by_parameter(
        self, backwards: _Counting, parameters: Sequence[Tensor], unread: list[int], device: torch.device
    ) -> list[Report]:
        """Return reports with flags combined for each parameter; unchanged gradients come first."""
        for table in self._tables.values():
            table.clear()
        for owners, flags in backwards:
            if flags.device not in self._tables:
                self._tables[flags.device] = FlagTable(flags.device)
            self._tables[flags.device].add(owners, flags)
        reports = []
        if any(own is self._everybody for owners, _ in backwards for own in owners):
            reports.append(Report([None], self._read([self._everybody], device)))
        read_too = set(unread)
        unchanged = [parameter for at, parameter in enumerate(parameters) if at not in read_too]
        if unchanged:
            reports.append(Report(unchanged, self._read(unchanged, device)))
        if unread:
            others = [parameters[at] for at in unread]
            reports.append(Report(others, self._read(others, device), unread))
        return reports

    def _read(self, parameters: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the parameters' flags, 0 or 1: int32 ``[len(parameters)]`` on ``device``."""
        flags = torch.zeros(len(parameters), dtype=torch.int32, device=device)
        for table in self._tables.values():
            flags = torch.maximum(flags, moved(table.read(parameters), device))
        return flags.clamp(max=1)


def _whole(backwards: _Counting, parameters: Sequence[Tensor], device: torch.device) -> Report | None:
    """Return the flags as backwards reported them, if they count for exactly ``parameters``, each once.

    Return None if the flags must be combined by parameter.
    """
    owners = [own for owners, _ in backwards for own in owners]
    if len(owners) != len(parameters) or set(map(id, parameters)) != set(map(id, owners)):
        return None
    flags = [moved(own, device) for _, own in backwards]
    return Report(owners, flags[0] if len(flags) == 1 else torch.cat(flags))


def _several_ranks() -> bool:
    """Whether collectives may write to gradients, which does not raise their version."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
