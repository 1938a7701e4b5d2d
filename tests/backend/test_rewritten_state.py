"""A call of what fxamp.rewrite returns leaves grad mode, autocast and torch.func as an eager call does."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from support.oracles.like_autocast import assert_rewritten_like_autocast, leaf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.capture.autocast_state import autocast_depth, autocast_states

Mode = Callable[[], AbstractContextManager[Any]]
MODES: list[Mode] = [torch.enable_grad, torch.no_grad, torch.inference_mode]


class Scaled(nn.Module):
    """A block under ``no_grad``, and a layer after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            largest = self.layer(x).float().abs().amax()
        return self.layer(x) / largest


class Checkpointed(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result.sin()


def guided(x: Tensor) -> Tensor:
    """Computes a gradient inside ``no_grad``, as a sampler with guidance does."""
    with torch.no_grad():
        moved = x - torch.func.grad(lambda point: (point @ point).sum())(x.sin())
    return moved * x


SOURCES: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "module": lambda model, x: model,
    "exported program": lambda model, x: torch.export.export(model, (x,)),
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("captured", MODES)
def test_it_follows_the_grad_mode_of_its_call(captured: Mode, mode: Mode, kind: str) -> None:
    model, x = Scaled(), torch.randn(3, 4)
    source = SOURCES[kind](model, x)
    with captured():
        rewritten = fxamp.rewrite(source, (x,), policy="cpu-bfloat16")
    with mode():
        before = torch.is_grad_enabled()
        assert rewritten(x).requires_grad is model(x).requires_grad is before
        assert torch.is_grad_enabled() is before


@pytest.mark.parametrize("model", [Scaled(), Checkpointed()])
def test_blocks_without_gradients_have_none(model: nn.Module) -> None:
    rewritten = assert_rewritten_like_autocast(model, leaf(3, 4), oracle=model)
    with torch.no_grad():
        assert not rewritten(leaf(3, 4)).requires_grad


@pytest.mark.parametrize("mode", MODES[:2])
def test_a_block_that_differentiates_keeps_gradients_on(mode: Mode) -> None:
    x = leaf(4, 4)
    rewritten = fxamp.rewrite(guided, (x,), policy="cpu-bfloat16")
    with mode():
        expected, result = guided(x), rewritten(x)  # casts are not inserted in transforms
    assert torch.equal(result, expected) and result.requires_grad is expected.requires_grad


def without_gradients(x: Tensor, index: Tensor) -> Tensor:
    with torch.no_grad():
        return x.index_select(0, index)


def in_a_transform(x: Tensor, index: Tensor) -> Tensor:
    result: Tensor = torch.vmap(lambda row: row.index_select(0, index))(x)
    return result


def in_a_region(x: Tensor, index: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        return in_a_transform(x @ x, index)


@pytest.mark.parametrize("program", [without_gradients, in_a_transform, in_a_region])
def test_an_error_in_a_block_leaves_it(program: Callable[..., Tensor]) -> None:
    x = torch.randn(4, 4)
    rewritten = fxamp.rewrite(program, (x, torch.tensor([0])), policy="cpu-bfloat16")
    before = autocast_states(), autocast_depth()
    with pytest.raises((IndexError, RuntimeError)):
        rewritten(x, torch.tensor([9]))
    assert torch.is_grad_enabled() and (autocast_states(), autocast_depth()) == before
    assert torch._C._functorch.maybe_current_level() is None


def test_a_rewritten_module_is_rewritten_again() -> None:
    model, x = Scaled(), torch.randn(3, 4)
    once = fxamp.rewrite(torch.export.export(model, (x,)), (x,), policy="cpu-bfloat16")
    twice = fxamp.rewrite(once, (x,), policy="cpu-bfloat16")
    assert torch.equal(twice(x), once(x)) and twice.code.count("@") == once.code.count("@") == 1
    with torch.no_grad():
        assert not twice(x).requires_grad
