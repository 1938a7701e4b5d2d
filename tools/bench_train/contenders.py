"""The contenders: every way of training that is compared. A new one is one entry of the table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Contender:
    """One way of training the same model with the same optimizer, torch's fused AdamW.

    ``label``: for people. ``compiler``: ``""`` for eager code, ``"torch"`` for torch.compile as it comes, ``"fxamp"``.
    ``autocast``: whether the forward runs under torch.autocast. ``scaler``: whose GradScaler scales the loss where the
    dtype is float16, ``"torch"`` or ``"fxamp"``; ``""`` for none. ``options`` are more options of the backend fxamp,
    ``scaler_options`` more arguments of its scaler.
    """

    label: str
    compiler: str = ""
    autocast: bool = False
    scaler: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    scaler_options: Mapping[str, Any] = field(default_factory=dict)


CONTENDERS: dict[str, Contender] = {
    "eager-float32": Contender("eager float32"),
    "eager-autocast": Contender("eager autocast", autocast=True, scaler="torch"),
    "compile-float32": Contender("torch.compile float32", compiler="torch"),
    "compile-autocast": Contender("torch.compile + autocast", compiler="torch", autocast=True, scaler="torch"),
    "fxamp": Contender("fxamp", compiler="fxamp", scaler="fxamp"),
}

#: Whose losses the others' are compared with: the first of these that is among the contenders.
FLOAT32 = ("eager-float32", "compile-float32")

#: What the ratios are taken to, by device, unless the user names another: what does the same work best today.
BASELINES = {"cpu": "compile-float32", "cuda": "compile-autocast"}
