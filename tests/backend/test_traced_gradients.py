"""``torch.autograd.grad`` and ``backward()`` that Dynamo traces: gradients are those of eager autocast, bit for bit."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.checks.exhaustive import each_once
from support.oracles.like_autocast import assert_like_autocast, leaf
from torch import Tensor
from torch.nn import functional as F

pytestmark = pytest.mark.skipif(not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="torch traces none")


@pytest.fixture(autouse=True)
def traced() -> Iterator[None]:
    with torch._dynamo.config.patch(trace_autograd_ops=True, error_on_recompile=True):
        yield


def of_a_weight(x: Tensor, w: Tensor) -> Any:
    y = F.linear(F.linear(x, w).relu(), w)
    return torch.autograd.grad(y.float().square().sum(), (w,), retain_graph=True)[0], y


def penalty(x: Tensor, w: Tensor) -> Any:
    y = F.linear(x, w).tanh()
    (gradient,) = torch.autograd.grad(y.float().square().sum(), inputs=(x,), create_graph=True)
    return gradient.float().square().sum() + y.float().sum()


def of_a_value_in_16_bits(x: Tensor, w: Tensor) -> Any:
    h = F.linear(x, w)
    (gradient,) = torch.autograd.grad((h @ w).float().sum(), (h,), retain_graph=True)
    return gradient @ w.detach(), h * 2


def of_both(x: Tensor, w: Tensor) -> Any:
    y = F.linear(x, w)
    outer = [torch.ones_like(y), y.detach()]
    return *torch.autograd.grad([y, y * 2], [x, w], grad_outputs=outer, retain_graph=True), y


def backward(x: Tensor, w: Tensor) -> Any:
    y = F.linear(x, w)
    y.float().square().sum().backward()
    return y.detach()


PROGRAMS = (of_a_weight, penalty, of_a_value_in_16_bits, of_both, backward)


@each_once("program, lowering, around", PROGRAMS, ["eager", "aot_eager"], [False, True])
def test_traced_gradients(program: Callable[..., Any], lowering: str, around: bool) -> None:
    torch._dynamo.utils.counters.clear()
    assert_like_autocast(program, leaf(4, 4), leaf(4, 4), lowering=lowering, around=around)
    assert not torch._dynamo.utils.counters["graph_break"]
