"""The settings of a comparison, the same for every contender, as values that JSON can hold."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

#: The values of ``--dtype``.
DTYPES = ("auto", "float16", "bfloat16")

#: The values of ``--optimizer``: classes of torch.optim, and their arguments besides the learning rate.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "Adam": {},
    "SGD": {"momentum": 0.9},
    "Adagrad": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {},
}

#: Those with a fused form in torch, which decides on the device whether to step.
FUSED = ("AdamW", "Adam", "SGD", "Adagrad")


@dataclass(frozen=True)
class Experiment:
    """One comparison.

    ``dtype`` is the 16-bit dtype of the contenders in mixed precision. "auto" leaves the choice to fxamp's
    ``policy="auto"``, and gives the autocast contenders bfloat16, or float16 where a GPU lacks it. ``steps`` are
    measured in each of ``rounds`` turns. ``seed`` seeds weights and batches; ``threads`` are CPU threads.
    ``lowering`` is that of the compiled contenders. ``optimizer`` is a name of :data:`OPTIMIZERS`;
    ``max_norm`` is the norm that gradients are clipped to, or None. ``changed`` holds dimensions of the model that are
    not those of ``size``.
    """

    model: str
    size: str
    device: str
    dtype: str = "auto"
    steps: int = 5
    rounds: int = 8
    seed: int = 0
    threads: int = 1
    lowering: str = "inductor"
    optimizer: str = "AdamW"
    max_norm: float | None = None
    changed: Mapping[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The fields by name; ``Experiment(**fields)`` gives the experiment back."""
        return asdict(self)

    @property
    def lower_dtype(self) -> str:
        """The dtype of the autocast contenders, ``"float16"`` or ``"bfloat16"``; with float16 losses are scaled."""
        from fxamp.backend.choose import native_bfloat16

        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if self.device == "cpu" or native_bfloat16(self.device) else "float16"
