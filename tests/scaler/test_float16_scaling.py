"""float16 outside of the compiled graphs, under an ambient autocast: where true gradients underflow, torch's come."""

from typing import Any

import pytest
import torch
from float16_stages import (
    LOWERINGS,
    STAGES,
    TINY,
    Chain,
    Linear,
    Run,
    assert_close,
    by_fxamp,
    by_torch,
    forward,
    loss_of,
)
from support.checks.exhaustive import each_once
from support.oracles.scaled_runs import assert_same_gradients
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@each_once("which, lowering", ["ec", "ce", "ece", "cec", "ecec", "eee", "oco", "cco"], LOWERINGS)
def test_a_chain_has_torchs_gradients_bit_for_bit(which: str, lowering: str) -> None:
    chain = Chain([Linear] * len(which))
    reference = by_torch(chain)
    assert_same_gradients(by_fxamp(chain, which, lowering), reference)
    assert all(gradient.abs().max() < 2.0**-18 for gradient in reference.values())


@each_once("kind, which, lowering", STAGES, ["cec", "ece", "eee", "coc"], LOWERINGS)
def test_every_kind_of_stage(kind: str, which: str, lowering: str) -> None:
    if kind == "in place" and lowering == "eager":
        which = which.replace("o", "e")
    chain = Chain([Linear, STAGES[kind], Linear])
    assert_close(by_fxamp(chain, which, lowering), by_torch(chain))


class Widened(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


class InFloat32(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x) * 3


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_float16_before_a_graph_that_takes_float32(lowering: str) -> None:
    """No float16 gradient enters or leaves the graph, and code before it computes in float16 all the same."""
    chain = Chain([Linear, Widened, InFloat32])
    assert_close(by_fxamp(chain, "eec", lowering), by_torch(chain))


def accumulated(net: nn.Module, scaler: Any, x: Tensor) -> None:
    for seed in range(3):
        scaler.scale(loss_of(forward(net, x * (1 + seed)))).backward()


def two_losses_one_after_the_other(net: nn.Module, scaler: Any, x: Tensor) -> None:
    result = forward(net, x)
    scaler.scale(loss_of(result)).backward(retain_graph=True)
    scaler.scale(loss_of(result[1:])).backward()


def two_losses_at_once(net: nn.Module, scaler: Any, x: Tensor) -> None:
    result = forward(net, x)
    losses = scaler.scale([loss_of(result), loss_of(result[1:] * 2)])
    torch.autograd.backward(losses)


def a_sum_of_scaled_losses(net: nn.Module, scaler: Any, x: Tensor) -> None:
    one, two = forward(net, x), forward(net, x * 2)
    ((scaler.scale(loss_of(one)) + scaler.scale(loss_of(two))) / 2).backward()


def scaled_twice_run_once(net: nn.Module, scaler: Any, x: Tensor) -> None:
    loss = loss_of(forward(net, x))
    scaler.scale(loss)
    scaler.scale(loss).backward()


def only_some_inputs(net: nn.Module, scaler: Any, x: Tensor) -> None:
    scaler.scale(loss_of(forward(net, x))).backward(inputs=[x, *net.parameters()])


def a_float16_loss(net: nn.Module, scaler: Any, x: Tensor) -> None:
    with torch.autocast("cpu", torch.float16):
        loss = (torch.nn.functional.linear(net(x), torch.full((1, 8), 2.0**-14)) * 2.0**-6).sum()
    assert loss.dtype == torch.float16
    scaler.scale(loss).backward()


def float16_results(net: nn.Module, scaler: Any, x: Tensor) -> None:
    with torch.autocast("cpu", torch.float16):
        results = torch.nn.functional.linear(net(x), torch.full((3, 8), 0.25))
    assert results.dtype == torch.float16
    scaler.scale(results).backward(torch.full((4, 3), 2.0**-20, dtype=torch.float16))


def inside_of_autocast(net: nn.Module, scaler: Any, x: Tensor) -> None:
    with torch.autocast("cpu", torch.float16):
        scaler.scale(net(x).float().square().mean() * TINY).backward()


def checkpointed(net: Any, scaler: Any, x: Tensor) -> None:
    with torch.autocast("cpu", torch.float16):
        for stage in net.stages:
            x = checkpoint(stage, x, use_reentrant=False)
    scaler.scale(loss_of(x)).backward()


def two_calls(net: nn.Module, scaler: Any, x: Tensor) -> None:
    one, two = forward(net, x), forward(net, x + 1)
    scaler.scale(loss_of(one * two)).backward()


RUNS = [
    accumulated,
    two_losses_one_after_the_other,
    two_losses_at_once,
    a_sum_of_scaled_losses,
    scaled_twice_run_once,
    only_some_inputs,
    inside_of_autocast,
    checkpointed,
    two_calls,
]


@each_once("run, which, lowering", RUNS, ["ece", "cec"], LOWERINGS)
def test_every_way_to_run_a_backward(run: Run, which: str, lowering: str) -> None:
    chain = Chain([Linear] * 3)
    assert_close(by_fxamp(chain, which, lowering, run), by_torch(chain, run))


@pytest.mark.parametrize("which", ["ec", "ce"])
@pytest.mark.parametrize("run", [a_float16_loss, float16_results])
def test_what_is_scaled_may_be_float16_itself(run: Run, which: str) -> None:
    chain = Chain([Linear] * 2)
    # A float16 tensor that is scaled itself takes no larger scale than float16 does.
    scale = 2.0**15
    assert_close(by_fxamp(chain, which, "aot_eager", run, scale), by_torch(chain, run, scale))
