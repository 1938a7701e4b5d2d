"""Who makes AdamW's step. Each takes the parameters, and returns what makes one step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import fxamp
from fxamp.tools.bench.step.plan import Plan

Step = Callable[[], object]


@dataclass(frozen=True)
class Contender:
    """``make(parameters, plan)`` returns what makes one step; ``compiles``: whether the first steps compile."""

    label: str
    make: Callable[[Sequence[Tensor], Plan], Step]
    compiles: bool = False


def _adamw(parameters: Sequence[Tensor], foreach: bool | None = None, fused: bool | None = None) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=foreach, fused=fused)


def _by_fxamp(parameters: Sequence[Tensor], plan: Plan) -> Step:
    return fxamp.compile_optimizer(_adamw(parameters), lowering=plan.lowering).step


def _by_compile(parameters: Sequence[Tensor], plan: Plan) -> Step:
    return torch.compile(_adamw(parameters).step, backend=plan.lowering)


CONTENDERS = {
    "foreach": Contender("torch, foreach=True", lambda own, plan: _adamw(own, foreach=True).step),
    "fused": Contender("torch, fused=True", lambda own, plan: _adamw(own, fused=True).step),
    "compile": Contender("torch.compile(optimizer.step)", _by_compile, compiles=True),
    "fxamp": Contender("fxamp.compile_optimizer", _by_fxamp, compiles=True),
}
