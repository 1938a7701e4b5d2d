"""Exported programs with calls that fxamp leaves verbatim: branches, loops over rows, transforms."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from support.checks.exhaustive import each_once, exhaustive
from support.oracles.like_autocast import leaf, run
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan

import fxamp


class Model(nn.Module):
    def __init__(self, program: Callable[["Model", Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self._program = program

    def forward(self, x: Tensor) -> Any:
        return self._program(self, x)


def branches(model: Model, x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, model.first, model.second, (x,))


def mapped(model: Model, x: Tensor) -> Any:
    return map_rows(lambda row: model.second(model.first(row).sin()), x)


def scanned(model: Model, x: Tensor) -> Any:
    def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return (carry + model.first(row)).tanh(), model.second(carry)

    return scan(step, x[0].clone(), x, dim=0)


def in_a_transform(model: Model, x: Tensor) -> Any:
    return torch.vmap(lambda row: row @ model.first.weight + row @ model.second.weight)(x)


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # torch's own
@each_once(
    "program, as_module, dynamic",
    exhaustive([branches, mapped, scanned, in_a_transform], always=[branches, scanned]),
    [False, True],
    [False, True],
)
def test_results_and_gradients(program: Callable[[Model, Tensor], Any], as_module: bool, dynamic: bool) -> None:
    """Branches are cast as under autocast; nothing is cast inside the other calls."""
    model, x = Model(program), leaf(4, 8)
    shapes = {"x": {0: torch.export.Dim("rows", min=2, max=64)}} if dynamic else None
    exported = torch.export.export(model, (x,), dynamic_shapes=shapes)
    rewritten = fxamp.rewrite(exported.module() if as_module else exported, (x,), policy="cpu-bfloat16")
    got, gradients = run(rewritten, (x,))
    expected, wanted = run(model, (x,), torch.bfloat16 if program is branches else None)
    assert len(got) == len(expected) and gradients.keys() == wanted.keys()
    assert_equal([*got, *gradients.values()], [*expected, *wanted.values()])
