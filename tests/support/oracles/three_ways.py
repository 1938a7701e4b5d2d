"""A library's own trainer, run as the library runs it, under torch.compile, and with fxamp in torch.compile's place.

A library's file gives one function that trains a tiny model by the library's own loop, and says where the model is
compiled. It knows nothing of fxamp: everything else is here. Losses are those that the library calls ``backward`` on.

Under "eager" the numbers are to be those of the library's own autocast, under "aot_eager" those of torch.compile's
"aot_eager", bit for bit. Where a library's file says why not, under Inductor, and where steps are compiled, weights are
to be no further from torch's run than that is from the run in float32; under lean policies by the factor by which what
they keep is coarser than bfloat16.
"""

import importlib
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import fxamp
from fxamp.reports.warnings import warn_once
from support.checks.messages import said_by_fxamp

#: Why numbers differ from torch.compile's where layers share a weight; under "eager" they are autocast's.
CAST_ONCE = "autocast casts the weight once in a region, and so does fxamp; torch.compile casts it for each use"


def library(name: str) -> ModuleType:
    """Import a module of a library, whatever it warns of; skip the file that asks for it where it is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(name, exc_type=ImportError)
        return importlib.import_module(name)


@dataclass
class Way:
    """How a trainer runs. ``mixed``: in the library's autocast, of bfloat16. ``settings``: of ``model.compile``."""

    mixed: bool
    settings: dict[str, Any] | None = None
    compiled: list[Any] = field(default_factory=list)

    def compile(self, model: nn.Module) -> Any:
        """Compile ``model`` in place, if at all; return it."""
        if self.settings is not None:
            nn.Module.compile(model, **self.settings)
            self.compiled.append(model)
        return model

    def autocast(self) -> torch.autocast:
        """Return the autocast region around a whole training, of a library that leaves mixed precision to its callers.

        Without autocast's cache, which would keep the casts of the first step's weights.
        """
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.mixed, cache_enabled=False)

    def cast_forward(self, model: nn.Module) -> None:
        """Run ``model.forward`` in autocast, for libraries that need results in float32, as Accelerate does it."""
        if self.mixed:
            region = torch.autocast("cpu", dtype=torch.bfloat16)
            model.forward = convert_outputs_to_fp32(region(model.forward))


#: Kept values in 8 bits have 3 bits of fraction, bfloat16 has 7.
COARSER = 2**4

#: Trains, and returns the model, whose weights are compared.
Train = Callable[[Way], nn.Module]


@dataclass(frozen=True)
class Variant:
    """One way to put fxamp in: its options, and whether optimizers are compiled too."""

    policy: str = "cpu-bfloat16"
    lowering: str = "aot_eager"
    steps: bool = False

    def __str__(self) -> str:
        return ", ".join([self.policy, self.lowering, *(["compiled steps"] if self.steps else [])])

    @property
    def way(self) -> Way:
        """The library's autocast stays: what no graph holds needs it, and "auto" follows it."""
        options = {"policy": self.policy, "lowering": self.lowering}
        return Way(True, {"backend": "fxamp", "options": options})


VARIANTS = [
    Variant(lowering="eager"),
    Variant(),
    Variant("auto"),
    Variant("cpu-bfloat16-lean"),
    Variant(steps=True),
]


def each_variant(inductor: bool = False) -> pytest.MarkDecorator:
    """Parametrize a test with ``variant``; ``inductor``: with Inductor's kernels too."""
    variants = [*VARIANTS, *([Variant(lowering="inductor")] if inductor else [])]
    exhaustive, slow = pytest.mark.exhaustive, pytest.mark.inductor
    marks = [[exhaustive, slow] if one.lowering == "inductor" else [exhaustive] for one in variants]
    rows = [pytest.param(one, marks=of, id=str(one)) for one, of in zip(variants, marks, strict=True)]
    return pytest.mark.parametrize("variant", rows)


@dataclass(frozen=True)
class Run:
    """The outcome of a training: the loss of every step, weights and buffers, warnings, and fxamp's reports."""

    losses: list[float]
    weights: dict[str, Tensor]
    warned: set[str]
    logged: list[str]
    reports: list[Any]

    def distance(self, other: "Run") -> float:
        """Return the norm of the difference of all weights, relative to that of ``other``'s."""
        pairs = [(self.weights[name].double(), value.double()) for name, value in other.weights.items()]
        return float(sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)) ** 0.5


def run(train: Train, way: Way, compile_steps: bool = False) -> Run:
    """Train once, from the same seeds."""
    torch._dynamo.reset()
    warn_once.cache_clear()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    losses: list[float] = []
    with ExitStack() as stack:
        warned = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        logged = stack.enter_context(said_by_fxamp(logging.WARNING))
        stack.enter_context(_noting(losses))
        if compile_steps:
            stack.enter_context(_compiled_steps())
        model = train(way)
        reports = [fxamp.report(compiled) for compiled in way.compiled]
    weights = {name: value.detach().clone() for name, value in model.state_dict().items() if value.is_floating_point()}
    texts = {str(warning.message) for warning in warned if not str(warning.message).startswith("`torch.jit")}
    return Run(losses, weights, texts, logged, reports)


@cache
def torch_runs(train: Train, backend: str) -> tuple[Run, Run, Run]:
    """Return the runs in float32, in the library's autocast, and in it under torch.compile with ``backend``."""
    return run(train, Way(False)), run(train, Way(True)), run(train, Way(True, {"backend": backend}))


def assert_trains_alike(train: Train, variant: Variant, *, inexact: str = "", outside: tuple[str, ...] = ()) -> None:
    """Compare losses, weights, warnings and reports with torch's runs; fxamp logs nothing.

    ``inexact``: why numbers are not equal bit for bit. ``outside``: the parameters that no graph reads.
    """
    plain, own, compiled = torch_runs(train, "inductor" if variant.lowering == "inductor" else "aot_eager")
    ours = run(train, variant.way, variant.steps)

    assert len(ours.losses) == len(own.losses) == len(compiled.losses) > 1
    assert ours.weights.keys() == own.weights.keys()
    more = ours.warned - own.warned - compiled.warned
    assert not more, more
    assert not ours.logged, ours.logged
    assert ours.reports
    for report in ours.reports:
        assert report.casts > 0 and report.limited == report.skipped == (), str(report)
        assert report.outside == outside, str(report)

    theirs = own if variant.lowering == "eager" else compiled
    exact = not inexact and variant.lowering != "inductor" and "lean" not in variant.policy and not variant.steps
    if exact:
        assert ours.losses == theirs.losses, (ours.losses, theirs.losses)
        unequal = [name for name, value in theirs.weights.items() if not torch.equal(ours.weights[name], value)]
        assert not unequal, (unequal, ours.distance(theirs))
    assert ours.distance(plain) > 0, "nothing was cast"
    coarser = COARSER if "lean" in variant.policy else 1
    assert ours.distance(theirs) <= coarser * theirs.distance(plain), (ours.distance(theirs), theirs.distance(plain))


@contextmanager
def _noting(losses: list[float]) -> Iterator[None]:
    """Note each loss that ``backward`` is called on."""
    backward = Tensor.backward

    def noting(self: Tensor, *args: Any, **kwargs: Any) -> None:
        losses.append(float(self.detach().sum()))
        backward(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "backward", noting)
        yield


@contextmanager
def _compiled_steps() -> Iterator[None]:
    """Compile each optimizer before its first step, wherever the library makes it."""
    seen: set[int] = set()

    def compile_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) not in seen:
            seen.add(id(optimizer))
            fxamp.compile_optimizer(optimizer, lowering="aot_eager")

    handle = register_optimizer_step_pre_hook(compile_step)
    try:
        yield
    finally:
        handle.remove()
