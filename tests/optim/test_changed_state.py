"""State tensors that are changed in place between compiled steps: the next step reads them as torch's own does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.exhaustive import each_once
from support.programs.user_optimizers import Counting
from torch import Tensor, nn

import fxamp
from fxamp.kernels import Implementation, forced
from fxamp.optim import CompiledOptimizer

SHAPE = (4, 3, 2, 2)
MAKES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9, foreach=False),
    "RMSprop": lambda own: torch.optim.RMSprop(own, lr=0.01, centered=True, foreach=False),
    "Adagrad": lambda own: torch.optim.Adagrad(own, lr=0.01, foreach=False),
    "AdamW": lambda own: torch.optim.AdamW(own, lr=0.01, foreach=False),
    "a user's own": Counting,
}


def replacing(new: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None]:
    """Return the change that assigns ``new`` of a tensor to its data."""
    return lambda value: setattr(value, "data", new(value.data))


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "float64": replacing(Tensor.double),
    "bfloat16": replacing(Tensor.bfloat16),
    "channels last": replacing(lambda data: data.contiguous(memory_format=torch.channels_last)),
    "another order": replacing(lambda data: data.transpose(0, 1).contiguous().transpose(0, 1)),
    "other values": replacing(lambda data: data * 2),
    "swapped": lambda value: torch.utils.swap_tensors(value, value.transpose(0, 1).clone().transpose(0, 1)),
    "set": lambda value: value.set_(value.detach().transpose(2, 3).contiguous().transpose(2, 3)),  # type: ignore[call-overload]
    "transposed in place": lambda value: value.transpose_(2, 3),
}
FLOATS = "float64", "bfloat16"
LEFT_OUT = {
    **{(name, dtype): "torch's own step raises an error" for name in ("RMSprop", "AdamW") for dtype in FLOATS},
    ("a user's own", "bfloat16"): "torch's own step binds a float32 tensor again, and a compiled one keeps bfloat16",
}


def results(make: str, change: str, lowering: str | None) -> list[Tensor]:
    """Return the parameters and states after steps between which every large state is changed."""
    generator = torch.Generator().manual_seed(0)
    own = [nn.Parameter(torch.randn(SHAPE, generator=generator)) for _ in range(2)]
    optimizer = MAKES[make](own)
    if lowering is not None:
        fxamp.compile_optimizer(optimizer, lowering=lowering)
    for at in range(5):
        if at == 3:
            states = [value for parameter in own for value in optimizer.state[parameter].values()]
            for value in states:
                if isinstance(value, Tensor) and value.dim():
                    CHANGES[change](value)
        for parameter in own:
            parameter.grad = torch.randn(SHAPE, generator=generator)
        optimizer.step()
    if lowering is not None:
        compiled = CompiledOptimizer.of(optimizer)
        assert compiled.compilations and not compiled.reasons
    return [*map(Tensor.detach, own), *(torch.as_tensor(v) for p in own for v in optimizer.state[p].values())]


def assert_close(make: str, change: str, lowering: str) -> None:
    tolerance = 2**-7 if change == "bfloat16" else 1e-5
    for ours, theirs in zip(results(make, change, lowering), results(make, change, None), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, check_dtype=ours.dim() > 0)


@each_once("make, change", MAKES, CHANGES)
def test_a_state_that_is_changed_in_place_is_read_as_it_is(make: str, change: str) -> None:
    if (make, change) in LEFT_OUT:
        pytest.skip(LEFT_OUT[make, change])
    assert_close(make, change, "aot_eager")


@pytest.mark.parametrize("change", ["float64", "another order"])
def test_a_kernel_reads_a_state_that_is_changed_in_place_as_it_is(change: str) -> None:
    with forced(Implementation.INTERPRETER):
        assert_close("momentum", change, "inductor")
