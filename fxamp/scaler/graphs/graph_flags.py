"""The flags of one scaler's compiled graphs: what their backwards reported since the last update."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fxamp.errors import OptionError
from fxamp.optim.gradients import GradientGroup, Gradients
from fxamp.optim.identity import Identity
from fxamp.reports.nonfinite import NonFinite
from fxamp.scaler.graphs.flag_table import FlagTable
from fxamp.scaler.graphs.wrappers import require_unscaled_sums
from fxamp.scaler.scale import Owner
from fxamp.torch_devices import moved
from fxamp.torch_private import compile_options, running_wrapper


class _Backward:
    """What compiled backwards reported of the gradients of ``owners``; of several, the identity and square of the last.

    Attributes:
        owners: weak references to the parameters; None for a gradient that belongs to none.
        unowned: the number of these.
        flags: whether each overflowed, bool or int32 ``[len(owners)]``.
        identity: of the gradients, as they were returned to autograd.
        square: the sum of the squares of all of them, 0-dim float32; None if unknown.
    """

    def __init__(self, owners: Sequence[Owner], flags: Tensor, identity: Identity, square: Tensor | None) -> None:
        self.owners, self.unowned = owners, owners.count(None)
        self.flags, self.identity, self.square = flags, identity, square

    def add(self, later: "_Backward") -> None:
        """Add what a later backward reported of the same owners."""
        self.flags = self.flags | later.flags
        self.identity, self.square = later.identity, later.square

    def living(self) -> list[Tensor | None]:
        """Return the owners; None for one that is gone, and for a gradient that belongs to none."""
        return [None if owner is None else owner() for owner in self.owners]


class _Share:
    """A backward's part in some parameters.

    Attributes:
        owners: of the backward's gradients.
        places: the place of each among the parameters, None for any other.
        count: the number of its gradients that belong to the parameters.
        whole: whether none of them belongs to another parameter.
    """

    def __init__(self, backward: _Backward, places: dict[int, int]) -> None:
        """``places``: the place of each of the parameters, by id."""
        self.backward, self.owners = backward, backward.living()
        self.places = list(map(places.get, map(id, self.owners)))
        others = self.places.count(None)
        self.count, self.whole = len(self.places) - others, others == backward.unowned

    def unchanged(self, gradients: Sequence[Tensor | None]) -> list[int]:
        """Return the places whose gradient is exactly what the backward returned; ``gradients``: by place."""
        return self.backward.identity.unchanged(self.places, gradients)


@dataclass(frozen=True, eq=False)
class Report:
    """What graphs say of some of the gradients that a check has to do with.

    ``parameters``: theirs; None for a gradient that belongs to none. ``flags``: whether a graph saw an overflow in
    each, bool or int32; None if there are no graphs. ``unread``: the places of gradients that a check must read,
    because they are not exactly what a graph checked; None if the flags decide.
    """

    parameters: Sequence[Tensor | None]
    flags: Tensor | None
    unread: list[int] | None = None


class GraphFlags:
    """The flags of one scaler's compiled graphs, and whether it is attached to any.

    Detached, the scaler multiplies losses itself. Attached, compiled backwards scale, unscale, check, and report here.

    Flags are sticky: an overflow in one backward is kept through later backwards, until :meth:`clear`. So one bad
    micro-batch skips the whole accumulated step. If a parameter's gradient is summed from several graphs, it is bad if
    any of them reported an overflow.

    A clean flag holds only for the gradient as the graph returned it. If the gradient changed since (summed with
    another one, all-reduced by DistributedDataParallel, changed by a hook), it must be checked again.

    A gradient that belongs to no parameter went on into an earlier graph or into eager code. Its flag counts for every
    optimizer: the overflow may be invisible later, for example after a hook that clamps.

    Attributes:
        attached: whether compiled backwards scale, unscale and check.
        scaled_losses: whether the scaler has multiplied a loss itself since the last update.
        accounts: weak references to what reads the values of graphs that were not finite, with option "nonfinite".
    """

    def __init__(self, scaled_losses: bool = False) -> None:
        self.attached = False
        self.scaled_losses = scaled_losses
        self.accounts: list[weakref.WeakMethod[Callable[[], tuple[NonFinite, ...]]]] = []
        self._backwards: dict[tuple[int, ...], _Backward] = {}
        self._tables: dict[torch.device, FlagTable] = {}
        self._everybody = torch.empty(0)
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
        """Whether ``scaler``, the owner, is attached; attach it if torch.compile has it, even if nothing is compiled.

        Dynamo may compile nothing of a model. Its gradients are true then, like those of a model that it compiles.
        """
        if not self.attached and not self.scaled_losses:
            self.attached = any(options.get("scaler") is scaler for options in compile_options())
        return self.attached

    def note_forward(self) -> None:
        """Remember the DistributedDataParallel whose forward is running, if any: a compiled graph runs inside it."""
        wrapper = running_wrapper()
        if wrapper is not None and self.attached:
            self._wrappers.add(wrapper)

    def require_wrappers(self) -> None:
        """Raise UnscaledError if a DistributedDataParallel around a graph sums in float16, or is inside ``join()``."""
        if self._wrappers:
            require_unscaled_sums(self._wrappers)

    # ---- what backwards report ----

    def record(
        self, owners: Sequence[Owner], flags: Tensor, gradients: Sequence[Tensor], square: Tensor | None = None
    ) -> None:
        """Record what one compiled backward found; waits for no device.

        Args:
            owners: for each flag a weak reference to the parameter whose gradient it is, or None for a gradient that
                no parameter owns; such a flag counts for every optimizer.
            flags: bool, or 0 or 1 in int32, ``[len(owners)]``: whether a gradient holds an inf or NaN.
            gradients: the unscaled gradients, as they are returned to autograd. They are not kept alive. A parameter
                whose ``.grad`` at the step is another tensor, or was written to, is checked again.
            square: the sum of the squares of all these gradients, 0-dim float32; None if unknown.

        Raises:
            OptionError: the scaler is not attached to a backend, or the lengths differ.
        """
        if not self.attached:
            raise OptionError("flags of a graph: call attach() first, so that scale() leaves losses to the graph")
        if flags.shape != (len(owners),) or len(gradients) != len(owners):
            raise OptionError(
                f"flags of a graph: {len(owners)} parameters, {len(gradients)} gradients, flags of shape "
                f"{tuple(flags.shape)}"
            )
        report = _Backward(owners, flags, Identity(gradients), square)
        # A living tensor has one weak reference, which the report keeps.
        earlier = self._backwards.setdefault(tuple(map(id, owners)), report)
        if earlier is not report:
            earlier.add(report)

    # ---- what a check reads ----

    def reports(self, group: GradientGroup, trusted: bool) -> list[Report]:
        """Return reports on all gradients of ``group``, with flags on its device.

        ``trusted``: False says of no gradient that it is unchanged, so that all are read.
        """
        parameters = group.parameters
        if not self.attached:
            return [Report(parameters, None, [*range(len(parameters))])] if parameters else []
        shares = self._shares(parameters)
        unread = _changed(shares, group.as_they_are()) if trusted else [*range(len(parameters))]
        if unread or not _partition(shares, parameters):
            return self._by_parameter(parameters, unread, group.device)
        flags = [moved(share.backward.flags, group.device) for share in shares]
        if len(shares) == 1:
            return [Report(shares[0].owners, flags[0])]
        return [Report([owner for share in shares for owner in share.owners], torch.cat(flags))]

    def square(self, gradients: Gradients, device: torch.device) -> Tensor | None:
        """Return the sum of the squares of an optimizer's gradients, 0-dim float32 on ``device``; None if unknown.

        It is known if every gradient is unchanged since a backward returned it, and those backwards returned no others.
        """
        if not gradients.plain or all(backward.square is None for backward in self._backwards.values()):
            return None
        parameters = gradients.parameters
        shares = [share for share in self._shares(parameters) if share.count]
        squares = [moved(square, device) for share in shares if (square := share.backward.square) is not None]
        known = len(squares) == len(shares) and not any(share.backward.unowned for share in shares)
        if not squares or not known or not _partition(shares, parameters) or _changed(shares, gradients.gradients):
            return None
        return torch.stack(squares).sum()

    def clear(self) -> None:
        """Drop all flags, and the record of which gradients were checked; the scaler stays attached."""
        self._backwards.clear()
        self.scaled_losses = False

    def _shares(self, parameters: Sequence[Tensor]) -> list[_Share]:
        """Return the backwards' parts in the parameters, of those that have one."""
        places = dict(zip(map(id, parameters), range(len(parameters)), strict=True))
        shares = [_Share(backward, places) for backward in self._backwards.values()]
        return [share for share in shares if share.count or share.backward.unowned]

    def _by_parameter(self, parameters: Sequence[Tensor], unread: list[int], device: torch.device) -> list[Report]:
        """Return reports where a flag of each parameter must be put together; unchanged gradients first."""
        for table in self._tables.values():
            table.clear()
        for backward in self._backwards.values():
            flags = backward.flags
            if flags.device not in self._tables:
                self._tables[flags.device] = FlagTable(flags.device)
            living = backward.living()
            self._tables[flags.device].add(
                [self._everybody if own is None else alive for own, alive in zip(backward.owners, living, strict=True)],
                flags,
            )
        reports = []
        if any(backward.unowned for backward in self._backwards.values()):
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


def _changed(shares: Sequence[_Share], gradients: Sequence[Tensor | None]) -> list[int]:
    """Return the places of the gradients that are not exactly what one of the backwards returned."""
    unchanged = {at for share in shares for at in share.unchanged(gradients)}
    return sorted(unchanged.symmetric_difference(range(len(gradients))))


def _partition(shares: Sequence[_Share], parameters: Sequence[Tensor]) -> bool:
    """Whether each of the parameters is in one share, and the backwards had no others; the shares cover them all."""
    return False not in [share.whole for share in shares] and sum([share.count for share in shares]) == len(parameters)
