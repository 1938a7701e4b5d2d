"""What is measured: the same for every contender, and plain enough to travel to another process as JSON."""

from dataclasses import asdict, dataclass
from typing import Any

#: What ``--dtype`` takes.
DTYPES = ("auto", "float16", "bfloat16")

#: What ``--optimizer`` takes: classes of torch.optim, and their arguments besides the learning rate.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "Adam": {},
    "SGD": {"momentum": 0.9},
    "Adagrad": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {},
}

#: Those that torch has a fused form of, which decides on the device whether to step.
FUSED = ("AdamW", "Adam", "SGD", "Adagrad")


@dataclass(frozen=True)
class Plan:
    """One comparison.

    ``dtype`` is the 16-bit dtype of the contenders in mixed precision. "auto" leaves the choice to fxamp's
    ``policy="auto"``, and gives the autocast contenders bfloat16, or float16 where a GPU lacks it. ``steps`` are
    measured in each of ``rounds`` turns. ``seed`` is that of weights and batches, ``threads`` the CPU threads.
    ``lowering`` is what the compiled contenders are lowered by. ``optimizer`` is a name of :data:`OPTIMIZERS`;
    ``max_norm`` is what gradients are clipped to, None for no clipping.
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

    def as_dict(self) -> dict[str, Any]:
        """The fields by name; ``Plan(**fields)`` gives the plan back."""
        return asdict(self)

    @property
    def lower_dtype(self) -> str:
        """The autocast contenders' dtype, ``"float16"`` or ``"bfloat16"``; where it is float16 losses are scaled."""
        from fxamp.backend.choose import native_bfloat16

        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if self.device == "cpu" or native_bfloat16(self.device) else "float16"
