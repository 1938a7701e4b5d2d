"""``outputs = "keep"``: a compiled call returns what the casts give; code inside of the call reads captured dtypes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.checks.exhaustive import each_once
from support.programs.small_models import Layer
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxamp

LOWERINGS = ("eager", "aot_eager")

#: Modules that refuse a 16-bit input beside their float32 weights: Dynamo or eager torch calls them after a break.
BEHIND_A_BREAK: dict[str, Callable[[], nn.Module]] = {
    "conv1d": lambda: nn.Conv1d(4, 3, 1),
    "prelu": nn.PReLU,
    "lstm": lambda: nn.LSTM(4, 3),
}


@each_once("name, lowering", BEHIND_A_BREAK, LOWERINGS)
def test_kept_outputs_are_captured_ones_before_a_break(name: str, lowering: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), BEHIND_A_BREAK[name]()

        def forward(self, x: Tensor) -> Any:
            hidden = self.first(x)
            torch._dynamo.graph_break()
            return self.second(hidden)

    torch.manual_seed(0)
    net, policy = Net(), replace(fxamp.Policy.load("cpu-bfloat16"), outputs="keep")
    x = torch.randn(4, 4)
    want = net(x)
    got = torch.compile(net, backend="fxamp", options={"policy": policy, "lowering": lowering})(x)
    for ours, wanted in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0.05, atol=0.05, check_dtype=False)


class Calling(nn.Module):
    """A model whose forward calls a layer, and another one that refuses a 16-bit input beside its float32 weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = Layer(), nn.Conv1d(4, 3, 1)


class InALoop(Calling):
    """Dynamo skips a forward that breaks in a loop, and compiles the layer's."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.layer(x)
            torch._dynamo.graph_break()
        return self.last(x[..., None])


class Disabled(Calling):
    @torch._dynamo.disable(recursive=False)
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x)[..., None])


class BreaksAtTheCall(Calling):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.called(x)[..., None])

    @torch._dynamo.disable(recursive=False)
    def called(self, x: Tensor) -> Tensor:
        return self.layer(x)


@each_once("model, lowering", [InALoop, Disabled, BreaksAtTheCall], LOWERINGS)
def test_kept_outputs_are_captured_ones_inside_a_function_that_is_not_compiled(
    model: Callable[[], nn.Module], lowering: str
) -> None:
    policy, net, x = replace(fxamp.Policy.load("cpu-bfloat16"), outputs="keep"), model(), torch.randn(2, 4)
    got = torch.compile(net, backend="fxamp", options={"policy": policy, "lowering": lowering})(x)
    torch.testing.assert_close(got, net(x), rtol=0.05, atol=0.05, check_dtype=False)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_kept_outputs_of_the_program_are_the_casts(lowering: str) -> None:
    """Also after two breaks, and below a decorator of torch's."""

    @torch.no_grad()
    def program(x: Tensor) -> Tensor:
        hidden = x @ x
        torch._dynamo.graph_break()
        hidden = hidden @ x
        torch._dynamo.graph_break()
        return hidden @ x

    policy = replace(fxamp.Policy.load("cpu-bfloat16"), outputs="keep")
    compiled = torch.compile(program, backend="fxamp", options={"policy": policy, "lowering": lowering})
    assert compiled(torch.ones(4, 4)).dtype is torch.bfloat16
