"""A comparison: its contenders, as a table, and its settings, the same for every contender."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    "Adadelta": {},
    "Adafactor": {},
    "Adamax": {},
    "ASGD": {},
    "Rprop": {},
}

#: Those with a fused form in torch, which decides on the device whether to step.
FUSED = ("AdamW", "Adam", "SGD", "Adagrad")


@dataclass(frozen=True)
class Experiment:
    """One comparison.

    ``dtype`` is the 16-bit dtype of the contenders in mixed precision. "auto" leaves the choice to fxamp's
    ``policy="auto"``, and gives the autocast contenders bfloat16, or float16 where a GPU lacks it. ``policies``
    are names and files of policies that are contenders too. ``steps`` are measured in each of ``rounds`` turns, and
    these in each of ``starts`` processes of a contender. ``seed`` seeds weights and batches; ``threads`` are CPU
    threads.
    ``lowering`` is that of the compiled contenders. ``optimizer`` is a name of :data:`OPTIMIZERS`;
    ``policy_optimizer``: whether a policy's ``[optimizer]`` table is in use, by a compiled step. ``all_results``:
    whether all results of the model leave it, not the loss alone. ``max_norm`` is the norm that gradients are clipped
    to, or None. ``changed`` holds dimensions of the model that are not those of ``size``. ``jobs``: how many contenders
    compile at once.
    """

    model: str
    size: str
    device: str
    dtype: str = "auto"
    policies: tuple[str, ...] = ()
    steps: int = 5
    rounds: int = 8
    starts: int = 2
    seed: int = 0
    threads: int = 1
    lowering: str = "inductor"
    optimizer: str = "AdamW"
    policy_optimizer: bool = False
    all_results: bool = False
    max_norm: float | None = None
    changed: Mapping[str, int] = field(default_factory=dict)
    jobs: int = 1

    @property
    def contenders(self) -> "Mapping[str, Contender]":
        """Those that can take part, by name; a policy's name is that of its contender."""
        return {**(STEPPERS if self.model == PARAMETERS else CONTENDERS), **policy_contenders(self.policies)}

    @property
    def lower_dtype(self) -> str:
        """The dtype of the autocast contenders, ``"float16"`` or ``"bfloat16"``; with float16 losses are scaled."""
        from fxamp.torch_devices import native_bfloat16

        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if self.device == "cpu" or native_bfloat16(self.device) else "float16"


@dataclass(frozen=True)
class Contender:
    """One way of training the same model with the same optimizer, in torch's fused form if it has one.

    ``label``: for people. ``compiler``: ``""`` for eager code, ``"torch"`` for plain torch.compile, ``"fxamp"``.
    ``autocast``: whether the forward runs under torch.autocast. ``scaler``: the GradScaler for float16,
    ``"torch"`` or ``"fxamp"``; ``""`` for none. ``options``: further options of fxamp's backend, or of the optimizer.
    ``policy``: the name or file of fxamp's policy, ``""`` for the one that the experiment's dtype says.
    ``scaler_options``: further arguments of its scaler. ``scaled``: takes part only if losses are scaled. ``fp8``: the
    recipe of products in fp8 that torchao converts the model to. ``if_named``: takes part only if it is named, as
    torchao does.
    """

    label: str
    compiler: str = ""
    autocast: bool = False
    scaler: str = ""
    policy: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    scaler_options: Mapping[str, Any] = field(default_factory=dict)
    scaled: bool = False
    fp8: str = ""
    if_named: bool = False

    @property
    def usual(self) -> bool:
        """Whether it takes part without being named, if losses are scaled where it needs that."""
        return not (self.fp8 or self.if_named)

    @property
    def fused(self) -> bool:
        """Whether to use torch's fused optimizer; fxamp compiles its step from the plain one."""
        return self.scaler_options.get("skip") != "device"


FLOAT32_COMPILED, AUTOCAST = "compile-float32", "compile-autocast"

CONTENDERS: dict[str, Contender] = {
    "eager-float32": Contender("eager float32"),
    "eager-autocast": Contender("eager autocast", autocast=True, scaler="torch"),
    FLOAT32_COMPILED: Contender("torch.compile float32", compiler="torch"),
    AUTOCAST: Contender("torch.compile + autocast", compiler="torch", autocast=True, scaler="torch"),
    "fxamp": Contender("fxamp", compiler="fxamp", scaler="fxamp"),
    "fxamp-skip-device": Contender(
        'fxamp, skip="device"',
        compiler="fxamp",
        scaler="fxamp",
        scaler_options={"skip": "device", "graph_norm": True},
        scaled=True,
    ),
    "fxamp-nonfinite": Contender(
        'fxamp, nonfinite="log"', compiler="fxamp", scaler="fxamp", options={"nonfinite": "log"}, if_named=True
    ),
    "torchao-fp8": Contender("torchao fp8", compiler="torch", autocast=True, scaler="torch", fp8="tensorwise"),
    "torchao-fp8-rowwise": Contender(
        "torchao fp8 rowwise", compiler="torch", autocast=True, scaler="torch", fp8="rowwise"
    ),
}


def policy_contenders(policies: Sequence[str]) -> dict[str, Contender]:
    """A contender for each name or file of a policy."""
    return {name: Contender(f"fxamp {name}", compiler="fxamp", scaler="fxamp", policy=name) for name in policies}


#: In the place of a model: its parameters alone, ``tensors`` of them, with ``width``.
PARAMETERS = "gpt2-parameters"

#: The ways of making an optimizer's step.
STEPPERS: dict[str, Contender] = {
    "foreach": Contender("torch, foreach=True", options={"foreach": True}),
    "fused": Contender("torch, fused=True", options={"fused": True}),
    "compile": Contender("torch.compile(optimizer.step)", compiler="torch"),
    "fxamp": Contender("fxamp.compile_optimizer", compiler="fxamp"),
}

#: The losses are compared with those of the first of these contenders that takes part.
FLOAT32 = ("eager-float32", FLOAT32_COMPILED)

#: The values of ``--device``.
DEVICES = ("cpu", "cuda")


def usual_baseline(device: str) -> str:
    """The baseline: the best other way to do the same work on the device; float32 where it has no 16-bit units."""
    from fxamp.torch_devices import native_bfloat16

    return AUTOCAST if device == "cuda" or native_bfloat16(device) else FLOAT32_COMPILED
