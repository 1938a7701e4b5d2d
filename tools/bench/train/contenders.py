"""The contenders: every way of training that is compared. A new one is one entry of the table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Contender:
    """One way of training the same model with the same optimizer, in torch's fused form if it has one.

    ``label``: for people. ``compiler``: ``""`` for eager code, ``"torch"`` for torch.compile as it comes, ``"fxamp"``.
    ``autocast``: whether the forward runs under torch.autocast. ``scaler``: whose GradScaler scales the loss where the
    dtype is float16, ``"torch"`` or ``"fxamp"``; ``""`` for none. ``options`` are more options of the backend fxamp,
    ``scaler_options`` more arguments of its scaler. ``scaled``: takes part where losses are scaled, and nowhere else.
    """

    label: str
    compiler: str = ""
    autocast: bool = False
    scaler: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    scaler_options: Mapping[str, Any] = field(default_factory=dict)
    scaled: bool = False

    @property
    def fused(self) -> bool:
        """Whether the optimizer is to be torch's fused one; a step that fxamp compiles is made of the plain one."""
        return self.scaler_options.get("skip") != "device"


CONTENDERS: dict[str, Contender] = {
    "eager-float32": Contender("eager float32"),
    "eager-autocast": Contender("eager autocast", autocast=True, scaler="torch"),
    "compile-float32": Contender("torch.compile float32", compiler="torch"),
    "compile-autocast": Contender("torch.compile + autocast", compiler="torch", autocast=True, scaler="torch"),
    "fxamp": Contender("fxamp", compiler="fxamp", scaler="fxamp"),
    "fxamp-skip-device": Contender(
        'fxamp, skip="device"',
        compiler="fxamp",
        scaler="fxamp",
        scaler_options={"skip": "device", "graph_norm": True},
        scaled=True,
    ),
}

#: Whose losses the others' are compared with: the first of these that is among the contenders.
FLOAT32 = ("eager-float32", "compile-float32")

#: What the ratios are taken to, by device, unless the user names another: what does the same work best today.
BASELINES = {"cpu": "compile-float32", "cuda": "compile-autocast"}
