"""What is counted, and for which way of training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxamp.tools.bench.cost.count import Count
    from fxamp.tools.bench.report import Report

#: The values of ``--dtype``.
DTYPES = ("float16", "bfloat16", "float32")

#: The values of ``--optimizer``: SGD has momentum; "none" leaves the step and the scaler's share of it out.
OPTIMIZERS = ("AdamW", "SGD", "none")


@dataclass(frozen=True)
class Workload:
    """One step of one model, the same for every way of training.

    ``model``: a name of the models that :mod:`fxamp.tools.bench.models` makes, or a Python file. ``sizes``: the
    dimensions of the former. ``dtype``: of the ambient autocast. ``loss_only``: whether the loss alone leaves the
    graph. ``scaler``: whether losses are scaled, whatever the dtype. ``optimizer``: of
    :data:`OPTIMIZERS`. ``clip``: whether gradients are clipped to a norm.
    """

    model: str
    dtype: str = "float16"
    sizes: Mapping[str, int] = field(default_factory=dict)
    loss_only: bool = False
    scaler: bool = False
    optimizer: str = "AdamW"
    clip: bool = False


@dataclass(frozen=True)
class Way:
    """One way of training: torch.compile, under autocast where the workload has a 16-bit dtype, or fxamp with a policy.

    ``policy``: ``""`` for torch; "auto" is resolved inside autocast, as in an existing script.
    """

    policy: str = ""

    @property
    def label(self) -> str:
        return {"": "torch.compile + autocast", "auto": "fxamp under autocast"}.get(self.policy, f"fxamp {self.policy}")


@dataclass(frozen=True)
class Plan:
    """What a command counts: each request, and the report of the counts that are there, in the order of requests."""

    requests: Sequence[tuple[Workload, Way]]
    report: Callable[[Sequence["Count"]], "Report"]
