"""An optimizer whose step is a function of one parameter, and runs of it in every way."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import fxamp
from fxamp.kernels import Implementation, forced

State = dict[str, Any]
Body = Callable[[nn.Parameter, State, float], None]

LOWERINGS = ("aot_eager", "inductor", "interpreter")
"""How a step runs: op by op, by Inductor, or as a generated kernel."""


class Written(torch.optim.Optimizer):
    """Its step calls ``body`` with each parameter, the parameter's state and the learning rate."""

    def __init__(self, parameters: Any, body: Body, state: Callable[[nn.Parameter], State]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.body = body
        for parameter in parameters:
            self.state[parameter].update(state(parameter))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.body(parameter, self.state[parameter], group["lr"])


def stepped(body: Body, state: Callable[[nn.Parameter], State], lowering: str, dtype: torch.dtype) -> list[Tensor]:
    """Return three parameters and their state after four steps."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in ((5,), (3, 2), ())]
    optimizer = Written(parameters, body, state)
    if lowering != "eager":
        fxamp.compile_optimizer(optimizer, lowering="aot_eager" if lowering == "aot_eager" else "inductor")
    with forced(Implementation.INTERPRETER) if lowering == "interpreter" else nullcontext():
        for _ in range(4):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=dtype)
            optimizer.step()
    values = [value for p in parameters for _, value in sorted(optimizer.state[p].items())]
    dtypes = {float: torch.float64, int: torch.int64}
    state_after = [torch.tensor(v, dtype=dtypes[type(v)]) if type(v) in dtypes else v for v in values]
    return [*(parameter.detach() for parameter in parameters), *state_after]
