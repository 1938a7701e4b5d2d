"""simplify-masks: which masks go, which stay, and that attention computes the same."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.checks.bench_graph import Workbench, workbench
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fxamp.graph.higher_order_ops import bodies
from fxamp.passes.forward import simplify_masks
from fxamp.passes.forward.simplify_masks import ATTENTION, SimplifyMasks

LENGTH = 6
X = torch.linspace(-1, 1, 2 * 2 * LENGTH * 4).view(2, 2, LENGTH, 4)

Mask = Callable[[Tensor], Tensor]


def positions() -> Tensor:
    return torch.arange(LENGTH)


def causal_of_positions(x: Tensor) -> Tensor:
    """As transformers computes it, with a test for packed sequences, which finds none."""
    rows = positions().expand(2, -1)
    packed = (rows.diff(prepend=rows[:, :1] - 1) != 1).cumsum(-1)
    same = packed[:, None, :, None] == packed[:, None, None, :]
    return (positions()[None, None, None, :] <= positions()[None, None, :, None]) & same


CAUSAL: dict[str, Mask] = {
    "positions": causal_of_positions,
    "two dimensions": lambda x: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(),
    "of each head": lambda x: torch.ones(2, 2, LENGTH, LENGTH, dtype=torch.bool).tril(),
    "float": lambda x: nn.Transformer.generate_square_subsequent_mask(LENGTH),
    "of another tensor's size": lambda x: torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril(),
}

EMPTY: dict[str, Mask] = {
    "broadcast, as transformers 5.17": lambda x: (positions()[:, None] >= 0).expand(2, 1, LENGTH, LENGTH),
    "float": lambda x: torch.zeros(LENGTH, LENGTH),
    "of fewer dimensions": lambda x: torch.ones(1, LENGTH, dtype=torch.bool),
}

OTHERS: dict[str, Mask] = {
    "an input decides": lambda x: x[0, 0, :, :1] > -2,
    "the diagonal is masked": lambda x: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-1),
    "two diagonals more": lambda x: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(2),
    "a window": lambda x: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(-2),
    "padding": lambda x: (positions() < LENGTH - 1)[None],
    "finite": lambda x: torch.full((LENGTH, LENGTH), -1e4).triu(1),
    "a bias": lambda x: torch.ones(LENGTH, LENGTH),
    "random": lambda x: torch.rand(LENGTH, LENGTH) > -1,
    "uninitialized": lambda x: torch.empty(LENGTH, LENGTH, dtype=torch.bool),
    "written": lambda x: torch.ones(LENGTH, LENGTH, dtype=torch.bool).masked_fill_(x[0, 0, :, :1] > 0, False),
    "a view is written": lambda x: written_by_view(),
}


def written_by_view() -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    mask[0].fill_(False)
    return mask


def bench_of(mask: Mask, allowed: bool = True, keys: int = LENGTH) -> Workbench:
    def program(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x[..., :keys, :], x[..., :keys, :], attn_mask=mask(x))

    bench = workbench(program, X)
    bench.context = replace(bench.context, any_attention_kernel=allowed)
    return bench


def calls(bench: Workbench) -> list[torch.fx.Node]:
    return list(bench.captured.module.graph.find_nodes(op="call_function", target=ATTENTION))


def simplified(mask: Mask) -> Workbench:
    """Run the pass; check that it changes one call, changes nothing twice, and that the results are the same."""
    bench = bench_of(mask)
    (expected,) = bench.captured.module(X)
    assert bench.run(SimplifyMasks()).counts == {"masks": 1}
    assert bench.run(SimplifyMasks()).modified == 0
    assert len(list(bench.captured.module.graph.nodes)) < 10, "what computed the mask is gone"
    (result,) = bench.captured.module(X)
    torch.testing.assert_close(result, expected)
    return bench


@pytest.mark.parametrize("mask", CAUSAL)
def test_a_causal_mask_becomes_an_argument(mask: str) -> None:
    (call,) = calls(simplified(CAUSAL[mask]))
    assert call.kwargs.get("is_causal") or call.args[5]


@pytest.mark.parametrize("mask", EMPTY)
def test_a_mask_that_masks_nothing_is_removed(mask: str) -> None:
    (call,) = calls(simplified(EMPTY[mask]))
    assert not call.kwargs.get("is_causal")


@pytest.mark.parametrize("mask", OTHERS)
def test_other_masks_stay(mask: str) -> None:
    bench_of(OTHERS[mask]).assert_unchanged_by(SimplifyMasks())


def test_a_mask_of_one_dimension_stays() -> None:
    """Only the kernel that computes the scores takes it: queries have three dimensions."""

    def program(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=positions() < LENGTH - 1)

    bench = workbench(program, X[0])
    bench.context = replace(bench.context, any_attention_kernel=True)
    bench.assert_unchanged_by(SimplifyMasks())


def test_golden() -> None:
    bench = bench_of(CAUSAL["two dimensions"])
    assert bench.golden("simplify-masks", SimplifyMasks()).modified == 1


def test_eager_mode_keeps_its_kernel() -> None:
    bench = bench_of(CAUSAL["positions"], allowed=False)
    assert bench.run(SimplifyMasks()).modified == 0


def test_a_causal_mask_of_fewer_keys_stays() -> None:
    """Kernels do not agree on the diagonal there."""
    bench = bench_of(lambda x: torch.ones(LENGTH, LENGTH - 1, dtype=torch.bool).tril(), keys=LENGTH - 1)
    assert bench.run(SimplifyMasks()).modified == 0


def test_a_large_mask_is_not_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simplify_masks, "MOST_ELEMENTS", LENGTH * LENGTH - 1)
    assert bench_of(CAUSAL["two dimensions"]).run(SimplifyMasks()).modified == 0


def test_a_mask_is_shared_with_calls_that_keep_it() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask), mask

    bench = workbench(program, X)
    bench.context = replace(bench.context, any_attention_kernel=True)
    assert bench.run(SimplifyMasks()).modified == 1
    attention, mask = bench.captured.module(X)
    torch.testing.assert_close(attention, F.scaled_dot_product_attention(X, X, X, is_causal=True))
    assert torch.equal(mask, torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())


def checkpointed(masks: list[Mask], where: Callable[[Tensor], Tensor] = lambda mask: mask) -> Workbench:
    """Attention in a checkpoint for each mask, which is computed outside; ``where``: what the checkpoint does to it."""

    def attend(x: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=where(mask))

    def program(x: Tensor) -> Tensor:
        for mask in masks:
            x = checkpoint(attend, x, mask(x), use_reentrant=False)
        return x

    bench = workbench(program, X.clone().requires_grad_())
    bench.context = replace(bench.context, any_attention_kernel=True)
    return bench


@pytest.mark.parametrize("where", [lambda mask: mask, lambda mask: mask & (positions() >= 0)], ids=["as it is", "and"])
def test_a_mask_that_a_checkpoint_is_given(where: Callable[[Tensor], Tensor]) -> None:
    bench = checkpointed([CAUSAL["positions"], EMPTY["broadcast, as transformers 5.17"]], where)
    (expected,) = bench.captured.module(X)
    assert bench.run(SimplifyMasks()).modified == 2
    (result,) = bench.captured.module(X)
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("mask", ["an input decides", "a window", "written"])
def test_other_masks_that_a_checkpoint_is_given(mask: str) -> None:
    assert checkpointed([OTHERS[mask]]).run(SimplifyMasks()).modified == 0


def test_a_mask_that_a_checkpoint_writes_to() -> None:
    bench = checkpointed([CAUSAL["two dimensions"]], lambda mask: mask.fill_(True))
    assert bench.run(SimplifyMasks()).modified == 0


def test_a_body_of_two_calls_with_different_masks() -> None:
    bench = checkpointed([CAUSAL["two dimensions"], lambda x: torch.ones(LENGTH, LENGTH, dtype=torch.bool)])
    first, second = (body for node in bench.captured.module.graph.nodes for body in bodies(node))
    second.replace(first.module)
    (expected,) = bench.captured.module(X)
    assert bench.run(SimplifyMasks()).modified == 0
    assert torch.equal(bench.captured.module(X)[0], expected)
