"""pytorch-optimizer and torch-optimizer: what ``compile_optimizer`` returns steps as the optimizer's own code does."""

import inspect
from typing import Any

import pytest
import torch
from support.oracles.three_ways import library
from torch import Tensor, nn

import fxamp

LIBRARIES = [library(name) for name in ("pytorch_optimizer", "torch_optimizer")]
SHAPES = ((6, 4), (4,), (3, 2, 3, 3))

BFLOAT16_PRODUCTS = ("SCION", "SCIONLight")
"""Their Newton-Schulz iteration multiplies in bfloat16, where another memory order of a matrix rounds otherwise."""


def optimizers() -> dict[str, Any]:
    classes = {
        f"{module.__name__}.{name}": value
        for module in LIBRARIES
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer)
    }
    return {name: value for name, value in classes.items() if not value.__module__.startswith("torch.optim")}


def stepped(make: Any, compiled: bool) -> list[Tensor]:
    """Return the parameters, the tensors and numbers of their state, and their gradients after seven steps."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    try:
        optimizer = make(parameters, lr=1e-2)
    except TypeError:
        optimizer = make(parameters)
    if compiled:
        fxamp.compile_optimizer(optimizer, lowering="aot_eager")
    generator = torch.Generator().manual_seed(1)
    for _ in range(7):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    entries = (optimizer.state.get(parameter, {}) for parameter in parameters)
    state = [value for entry in entries if isinstance(entry, dict) for _, value in sorted(entry.items())]
    numbers = [torch.as_tensor(value).double() for value in state if isinstance(value, (Tensor, int, float))]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [*(parameter.detach() for parameter in parameters), *numbers, *gradients]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", optimizers())
def test_a_compiled_step_is_the_optimizers_own(name: str) -> None:
    make = optimizers()[name]
    try:
        expected = stepped(make, compiled=False)
    except Exception as error:
        pytest.skip(f"not made or stepped from a list of parameters: {type(error).__name__}")
    atol = 1e-3 if make.__name__ in BFLOAT16_PRODUCTS else 1e-5
    torch.testing.assert_close(stepped(make, compiled=True), expected, rtol=1.3e-6, atol=atol)
