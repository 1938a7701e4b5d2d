"""Rules find modules under the names that the program gives them, whatever these names are."""

import pytest
import torch
from torch import Tensor, nn

import fxamp

NAMES = ("gen", "G", "L", "fn", "self", "mod", "module")


class Around(nn.Module):
    """A layer under a name of the program's choice, and one that no rule covers."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.Linear(16, 16))
        self.last = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.get_submodule(self.name)
        return layer(x), self.last(x)


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_rule_covers_a_module_whatever_its_name(name: str, exported: bool) -> None:
    torch._dynamo.reset()
    rule = f'[[rule]]\nid = "exact"\ncast = "fp32"\nops = ["linear"]\nmodules = [".{name}"]\n'
    policy = fxamp.Policy.loads(f'extends = ["cpu-bfloat16"]\n{rule}')
    model, x = Around(name), torch.randn(4, 16)
    if exported:
        run = fxamp.rewrite(model, (x,), policy=policy)
    else:
        run = torch.compile(model, backend="fxamp", options={"policy": policy, "lowering": "eager"})
    exact, (_, expected) = model(x), autocast(model, x)
    results = run(x)
    assert torch.equal(results[0].float(), exact[0]) and torch.equal(results[1].float(), expected.float())


def autocast(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        first, last = model(x)
    return first, last


def test_the_root_has_no_name_in_a_path() -> None:
    """Dynamo calls the root of a compiled layer ``fn``."""
    torch._dynamo.reset()
    compiled = torch.compile(nn.Linear(4, 4), backend="fxamp", options={"policy": "cpu-bfloat16", "lowering": "eager"})
    compiled(torch.ones(1, 4))
    (graph,) = fxamp.report(compiled).graphs
    assert {entry.module for entry in graph.listing.entries} == {""}
