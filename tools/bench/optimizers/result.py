"""One optimizer's row, as numbers and as JSON's values."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fxamp.tools.bench.optimizers.agreement import DIFFERS

#: Words for failures: of torch itself, or of fxamp alone.
NOT_IN_TORCH, FAILS = "not in torch", "fails"


@dataclass(frozen=True)
class Cell:
    """A scenario's outcome. ``word``: of agreement, NOT_IN_TORCH or FAILS; ``why``: what differs, or the error."""

    word: str
    why: str | None = None


@dataclass(frozen=True)
class Moved:
    """The cost of a step: ``host_syncs`` of scaler and optimizer; ``bytes`` read and written per parameter.

    ``bytes`` is None for sparse gradients, which cover an arbitrary part of the parameters.
    """

    host_syncs: int
    bytes: float | None


@dataclass(frozen=True)
class Pair:
    """A step's cost under torch.amp.GradScaler with the eager optimizer, and under fxamp; None if it cannot run."""

    torch: Moved | None
    fxamp: Moved | None


@dataclass(frozen=True)
class Row:
    """One optimizer. ``label``: its name with its arguments; ``decided_by``: "device", "host", or "-" if it never ran.

    ``reasons``: why the host decides, none if it does not.

    ``scenarios``: the outcome of each, by name; ``step`` and ``clipped``: a steady step without and with clipping.
    """

    name: str
    label: str
    decided_by: str
    reasons: tuple[str, ...]
    scenarios: Mapping[str, Cell]
    step: Pair
    clipped: Pair

    @property
    def wrong(self) -> bool:
        """Whether a scenario differs or fails."""
        return any(cell.word in (DIFFERS, FAILS) for cell in self.scenarios.values())


@dataclass(frozen=True)
class Reference:
    """torch's scaler with fused AdamW, its cheapest step: without and with clipping."""

    step: Moved
    clipped: Moved


@dataclass(frozen=True)
class Result:
    """All rows, with the facts that they depend on."""

    machine: Mapping[str, str]
    device: str
    lowering: str
    rows: Sequence[Row]
    reference: Reference

    def as_dict(self) -> dict[str, Any]:
        """JSON's values, under the names of the fields."""
        return asdict(self)
