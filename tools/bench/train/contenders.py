"""The contenders: the ways of training that are compared, as a table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Contender:
    """One way of training the same model with the same optimizer, in torch's fused form if it has one.

    ``label``: for people. ``compiler``: ``""`` for eager code, ``"torch"`` for plain torch.compile, ``"fxamp"``.
    ``autocast``: whether the forward runs under torch.autocast. ``scaler``: the GradScaler for float16,
    ``"torch"`` or ``"fxamp"``; ``""`` for none. ``options``: further options of fxamp's backend. ``scaler_options``:
    further arguments of its scaler. ``scaled``: takes part only if losses are scaled. ``fp8``: the recipe of products
    in fp8, which torchao converts the model to or fxamp's policy asks for; such a contender takes part if it is named.
    """

    label: str
    compiler: str = ""
    autocast: bool = False
    scaler: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    scaler_options: Mapping[str, Any] = field(default_factory=dict)
    scaled: bool = False
    fp8: str = ""

    @property
    def by_torchao(self) -> bool:
        """Whether torchao converts the model."""
        return bool(self.fp8) and self.compiler != "fxamp"

    @property
    def fused(self) -> bool:
        """Whether to use torch's fused optimizer; fxamp compiles its step from the plain one."""
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
    "torchao-fp8": Contender("torchao fp8", compiler="torch", autocast=True, scaler="torch", fp8="tensorwise"),
    "torchao-fp8-rowwise": Contender(
        "torchao fp8 rowwise", compiler="torch", autocast=True, scaler="torch", fp8="rowwise"
    ),
    "fxamp-fp8": Contender("fxamp fp8", compiler="fxamp", scaler="fxamp", fp8="tensorwise"),
    "fxamp-fp8-rowwise": Contender("fxamp fp8 rowwise", compiler="fxamp", scaler="fxamp", fp8="rowwise"),
}

#: The losses are compared with those of the first of these contenders that takes part.
FLOAT32 = ("eager-float32", "compile-float32")

#: The default baseline of the ratios by device: the best other way to do the same work.
BASELINES = {"cpu": "compile-float32", "cuda": "compile-autocast"}
