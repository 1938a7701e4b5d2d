"""A call that returns its own input in float32 is a tensor of its own where the policy makes it convert."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.checks.exhaustive import each_once
from support.oracles.like_autocast import assert_like_autocast
from torch import Tensor
from torch.nn import functional as F

from fxamp import rewrite

#: Calls that give back their input if it is float32 on the CPU, as it is while the program is captured.
CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "float": lambda h, x: h.float(),
    "to dtype": lambda h, x: h.to(torch.float32),
    "to tensor": lambda h, x: h.to(x),
    "to device": lambda h, x: h.to("cpu"),
    "to device and dtype": lambda h, x: h.to("cpu", torch.float32),
    "to other of 16 bits": lambda h, x: (x * 1).to(h),
    "type": lambda h, x: h.type(torch.float32),
    "type_as": lambda h, x: h.type_as(x),
    "cpu": lambda h, x: h.cpu(),
    "contiguous": lambda h, x: h.contiguous(),
    "dropout": lambda h, x: F.dropout(h, 0.5, training=False),
    "requires_grad_": lambda h, x: (h * 1).requires_grad_(),
}


def reads(h: Tensor, a: Tensor) -> Any:
    return a * h.sigmoid()


def writes_to_source(h: Tensor, a: Tensor) -> Any:
    h.add_(1)
    return a * 2, h * 1


def writes_to_result(h: Tensor, a: Tensor) -> Any:
    a.mul_(100)
    return a * 1, h * 1


def without_grad(h: Tensor, a: Tensor) -> Any:
    """Of a result that was made without grad mode."""
    a.add_(1)
    return a * h, h.sigmoid()


def program(name: str, use: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor, Tensor], Any]:
    """What ``use`` makes of a product and of what the call returns for it."""

    def run(x: Tensor, w: Tensor) -> Any:
        h = x @ w
        with torch.no_grad() if use is without_grad else nullcontext():
            a = CALLS[name](h, x)
        return use(h, a)

    return run


@each_once(
    "name, use, lowering", CALLS, [reads, writes_to_source, writes_to_result, without_grad], ["eager", "aot_eager"]
)
def test_a_call_that_may_return_its_input(name: str, use: Callable[..., Any], lowering: str) -> None:
    if use is without_grad and name not in ("float", "type_as", "to dtype"):
        pytest.skip("a write to a tensor that still is its source is refused without grad mode, in eager mode too")
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(4, 4, generator=generator).requires_grad_() for _ in range(2))
    assert_like_autocast(program(name, use), x, w, lowering=lowering)


def test_the_source_stays_what_it_was() -> None:
    x = torch.randn(4, 4)
    rewritten = rewrite(program("float", reads), (x, x), policy="cpu-bfloat16")
    (sigmoid,) = rewritten.graph.find_nodes(op="call_function", target=torch.ops.aten.sigmoid.default)
    assert sigmoid.args[0].target is torch.ops.aten.matmul.default
    assert sigmoid.meta["val"].dtype is torch.bfloat16


@pytest.mark.parametrize("copy", [lambda h: h.to("cpu", copy=True), lambda h: h.to(torch.device("cpu"), copy=True)])
def test_a_copy_that_converts_nothing_is_a_clone(copy: Callable[[Tensor], Tensor]) -> None:
    """Inductor returns the input itself for a conversion that changes nothing, even with ``copy=True``."""
    x = torch.randn(4, 4)
    rewritten = rewrite(lambda x, w: copy(x @ w), (x, x), policy="cpu-bfloat16")
    assert rewritten.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
