"""Who makes AdamW's step. Each takes the parameters, and returns what makes one step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import fxamp
from fxamp.tools.bench.step.setup import Setup

Step = Callable[[], object]


@dataclass(frozen=True)
class Contender:
    """``make(parameters, setup)`` returns what makes one step; ``compiles``: whether the first steps compile."""

    label: str
    make: Callable[[Sequence[Tensor], Setup], Step]
    compiles: bool = False


def _adamw(parameters: Sequence[Tensor], foreach: bool | None = None, fused: bool | None = None) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=foreach, fused=fused)


def _by_fxamp(parameters: Sequence[Tensor], setup: Setup) -> Step:
    return fxamp.compile_optimizer(_adamw(parameters), lowering=setup.lowering).step


def _by_compile(parameters: Sequence[Tensor], setup: Setup) -> Step:
    return torch.compile(_adamw(parameters).step, backend=setup.lowering)


CONTENDERS = {
    "foreach": Contender("torch, foreach=True", lambda own, setup: _adamw(own, foreach=True).step),
    "fused": Contender("torch, fused=True", lambda own, setup: _adamw(own, fused=True).step),
    "compile": Contender("torch.compile(optimizer.step)", _by_compile, compiles=True),
    "fxamp": Contender("fxamp.compile_optimizer", _by_fxamp, compiles=True),
}
