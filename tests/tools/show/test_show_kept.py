"""Bytes kept for the backward, against what autograd saves of the same program on real tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.programs.show_dumps import Attention, Gpt, Mlp
from torch.fx import GraphModule

from fxamp.policy import Policy
from fxamp.reports.kept import saved_tensors, total_bytes
from fxamp.tools.inputs.prepare import ProgramGraph


class Layers(torch.nn.Module):
    """Without a norm: FakeTensors give a norm's statistics in the dtype of its input, CPU kernels in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.second = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x) * 2).exp()).softmax(-1).sum()


def _both(model: torch.nn.Module, *inputs: torch.Tensor) -> tuple[list[int | None], list[int | None]]:
    """What fxamp counts without and with casts, and what eager torch saves without and with autocast."""
    graphs: list[ProgramGraph] = []
    policy = Policy.load("cpu-bfloat16").resolve("cpu")

    def take(gm: GraphModule, values: list[Any]) -> Callable[..., Any]:
        graphs.append(ProgramGraph("graph", gm, list(values)))
        counted.append(graphs[-1].listing(policy, ""))
        return gm.forward

    counted: list[Any] = []
    torch.compile(model, backend=take, dynamic=False)(*inputs)
    (listing,) = counted
    arguments = [*model.parameters(), *model.buffers(), *inputs]
    eager: list[int | None] = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            _, saved = saved_tensors(lambda: model(*inputs))
        eager.append(total_bytes(saved, arguments))
    return [listing.kept_before, listing.kept_after], eager


@pytest.mark.parametrize(
    ("model", "example"),
    [(Layers, lambda: torch.randn(5, 8)), (Gpt, lambda: torch.randint(32, (2, 6)))],
    ids=["layers", "gpt"],
)
def test_as_many_bytes_as_eager_autocast_saves(
    model: Callable[[], torch.nn.Module], example: Callable[[], torch.Tensor]
) -> None:
    counted, eager = _both(model(), example())
    assert counted == eager
    assert counted[0] != counted[1]


def test_storages_count_once_and_not_if_they_are_given() -> None:
    x, weight = torch.ones(4, 8), torch.ones(8, 8, requires_grad=True)
    result, saved = saved_tensors(lambda: ((x @ weight).exp() @ weight[:, :2]).sum())
    assert result.requires_grad
    assert total_bytes(saved, [x, weight]) == 4 * 8 * 4  # the result of exp, which two nodes save
    assert total_bytes(saved, [weight]) == 2 * 4 * 8 * 4
    assert total_bytes(saved) == 2 * 4 * 8 * 4 + 8 * 8 * 4


def test_a_norms_statistics_are_the_only_difference() -> None:
    counted, eager = _both(Mlp(), torch.randn(5, 8))
    assert counted[0] == eager[0]
    assert eager[1] is not None
    assert counted[1] == eager[1] - 2 * 5 * (4 - 2)  # mean and 1/deviation of 5 rows, as bfloat16 instead of float32


class Checkpointed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.utils.checkpoint.checkpoint(self.block, x * 2, use_reentrant=False)
        return y.sum()


def test_a_checkpoint_keeps_its_inputs_alone() -> None:
    counted, _ = _both(Checkpointed(), torch.randn(2, 4, 16))
    assert counted[0] == 2 * 4 * 16 * 4


def test_unknown_where_nothing_needs_a_gradient() -> None:
    model = Attention().requires_grad_(False)
    assert _both(model, torch.randn(2, 4, 16))[0] == [None, None]
