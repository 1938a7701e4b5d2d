"""Nothing that is traced writes to a tensor of the user, whoever holds it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from support.checks.exhaustive import each_once
from support.oracles.like_autocast import compile_with
from support.programs.small_models import Wrapped
from torch import Tensor, nn

from fxamp import rewrite


class Counting(nn.Module):
    """Writes to everything that a module can hold: statistics, a buffer, a plain attribute, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))
        self.plain = torch.zeros(4)
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        self.plain.add_(self.calls)
        self.frozen.add_(self.plain)
        torch._foreach_add_([self.calls, self.plain], 1.0)
        return self.norm(x) + self.frozen


def tensors(model: nn.Module) -> dict[str, Tensor]:
    plain = {n: v for n, v in vars(model).items() if isinstance(v, Tensor)}
    return {**dict(model.named_parameters()), **dict(model.named_buffers()), **plain}


class Leaves(torch.fx.Tracer):
    """Keeps every submodule whole, as a ``call_module`` node."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def with_leaves(model: nn.Module) -> nn.Module:
    graph = Leaves().trace(model)
    return torch.fx.GraphModule(model, graph)


SOURCES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "module": lambda model: model,
    "call_module": lambda model: with_leaves(Wrapped(model)),
}


@pytest.mark.parametrize("name", SOURCES)
def test_rewrite_changes_no_tensor_of_its_source(name: str) -> None:
    model = Counting()
    source, x = SOURCES[name](model), torch.randn(3, 4)
    before = {key: (value, value.clone()) for key, value in tensors(model).items()}
    rewritten = rewrite(source, (x,), policy="cpu-bfloat16")
    after = tensors(model)
    assert after.keys() == before.keys()
    for key, (tensor, value) in before.items():
        assert after[key] is tensor and torch.equal(tensor, value), key
    reference = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rewritten(x), reference(x))
    assert_equal(tensors(model), tensors(reference))


@each_once(
    "kind, settings, lowering",
    [torch.optim.Adam, torch.optim.AdamW],
    [{"foreach": False}, {"foreach": True}, {"amsgrad": True}],
    ["eager", "aot_eager"],
)
def test_a_compiled_step_is_the_eager_step(kind: Any, settings: dict[str, Any], lowering: str) -> None:
    def trained(step: Callable[[torch.optim.Optimizer], Callable[[], Any]]) -> tuple[Tensor, dict[str, Any]]:
        parameter = nn.Parameter(torch.ones(2))
        optimizer = kind([parameter], **settings)
        run = step(optimizer)
        for number in range(3):
            parameter.grad = torch.full((2,), 0.5 + number)
            run()
        return parameter.detach(), optimizer.state[parameter]

    parameter, state = trained(lambda optimizer: compile_with(optimizer.step, lowering))
    expected, expected_state = trained(lambda optimizer: optimizer.step)
    torch.testing.assert_close(parameter, expected, rtol=1e-6, atol=0)
    assert state["step"].item() == expected_state["step"].item() == 3
    torch.testing.assert_close(state, expected_state, rtol=1e-6, atol=0)


@pytest.mark.parametrize("exported", [False, True])
def test_a_traced_model_keeps_its_statistics(exported: bool) -> None:
    model, x = Wrapped(nn.BatchNorm1d(4)), torch.randn(3, 4)
    source = torch.export.export(model, (x,)) if exported else torch.fx.symbolic_trace(model)
    rewritten = rewrite(source, (x,), policy="cpu-bfloat16")
    assert model.inner.num_batches_tracked == 0
    rewritten(x)
    assert model.inner.num_batches_tracked == 1
