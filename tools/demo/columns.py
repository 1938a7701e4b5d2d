"""The runs of the demo, each a column of its table: plain torch.compile, fxamp, and fxamp with a lean policy."""

from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

from fxamp.dtypes import SCALED_DTYPES
from fxamp.policy import OptimizerPrecision, Policy
from fxamp.scaler import GradScaler
from fxamp.tools.common.policy_step import optimizer_precision, stepped_by_policy
from fxamp.tools.demo.ranks import Ranks
from fxamp.tools.demo.text import Text
from fxamp.tools.demo.train import TrainingResult, TrainingSettings, train
from fxamp.torch_devices import native_bfloat16


@dataclass(frozen=True)
class Column:
    """One run.

    ``label``: its name in the table. ``policy``: None for plain torch.compile. ``optimizer``: whether the policy's
    ``[optimizer]`` table is in use, by a compiled step.
    """

    label: str
    policy: str | None
    lowering: str
    optimizer: bool = False

    @property
    def precision(self) -> OptimizerPrecision | None:
        """What the policy's ``[optimizer]`` table says, in use or not; None without one."""
        return None if self.policy is None else optimizer_precision(self.policy)


def columns_of(policy: str, device: str, lowering: str, optimizer: bool) -> list[Column]:
    """Return the runs. What lean policies keep is decided in a graph of the backward, which "eager" does not have."""
    lean = "aot_eager" if lowering == "eager" else lowering
    return [
        Column("float32", None, lowering),
        Column("fxamp", policy, lowering, optimizer),
        Column("fxamp lean", _lean(policy, device), lean, optimizer),
    ]


def _lean(policy: str, device: str) -> str:
    """Return the lean policy of the same dtype; the leanest one if the policy is that already."""
    auto = "bfloat16" if native_bfloat16(device) else "float16"
    name = f"{device}-{auto if policy == 'auto' else Policy.load(policy).lower_precision_fp}-lean"
    return f"{name}est" if policy == name else name


def run(column: Column, settings: TrainingSettings, text: Text, ranks: Ranks, stream: TextIO) -> TrainingResult:
    """Train one column and report progress on ``stream``."""
    if column.policy is None:
        return train(column.label, settings, text, {"backend": column.lowering}, stream, None, ranks)
    scaler = _scaler(column.policy, settings.device)
    options: dict[str, Any] = {"policy": column.policy, "lowering": column.lowering}
    if scaler is not None:
        options["scaler"] = scaler
    compiler = {"backend": "fxamp", "options": options}
    if not column.optimizer:
        return train(column.label, settings, text, compiler, stream, scaler, ranks)
    prepare = partial(stepped_by_policy, policy=column.policy, lowering=column.lowering)
    return train(column.label, settings, text, compiler, stream, scaler, ranks, prepare)


def _scaler(policy: str, device: str) -> GradScaler | None:
    """Return a scaler if the policy computes in float16, where gradients underflow without one."""
    if policy == "auto" or Policy.load(policy).lower_precision_fp not in SCALED_DTYPES:
        return None
    return GradScaler(device)


def usable_lowering(device: str, stream: TextIO) -> str:
    """Return Inductor if it can compile for this CPU; else AOTAutograd alone, and say so."""
    from fxamp.torch_private.parts.inductor import InvalidCxxCompiler, get_cpp_compiler

    if device != "cpu":
        return "inductor"
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        print("no C++ compiler found, which Inductor needs on a CPU: all runs use aot_eager", file=stream)
        return "aot_eager"
    return "inductor"
