"""Infinities and NaN that a program means are no alarm, forward and backward: masks, tests, what a ``where`` drops."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.exhaustive import exhaustive
from support.oracles.like_autocast import compile_with
from support.programs.small_models import Layer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, ctc_loss, gumbel_softmax, kl_div, nll_loss, scaled_dot_product_attention
from torch.utils._pytree import tree_leaves

import fxamp

INF = torch.inf
CAUSAL = torch.ones(4, 4, dtype=torch.bool).triu(1)
ADDED = torch.zeros(4, 4).masked_fill(CAUSAL, -INF)
ONE_ROW = torch.tensor([[True, True, True, True], [False, True, False, True], [False] * 4, [True, False, True, False]])


def _scores(h: Tensor) -> Tensor:
    return h @ h.transpose(-1, -2)


def _attend(h: Tensor, scores: Tensor) -> Tensor:
    return torch.softmax(scores, -1) @ h


def _encoded(h: Tensor) -> Tensor:
    layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
    return layer(h[None], src_mask=ADDED)


def _nucleus(h: Tensor) -> Tensor:
    """The most probable half of each row, as samplers cut it."""
    ranked, order = torch.sort(h, descending=True)
    share = ranked.softmax(-1)
    cut = share.cumsum(-1) - share > 0.5
    return torch.softmax(h.masked_fill(cut.scatter(-1, order, cut), -INF), -1)


def _running_softmax(h: Tensor) -> Tensor:
    """A softmax by blocks, whose running maximum begins at -inf."""
    top, total = torch.full((4,), -INF), torch.zeros(4)
    for block in h.split(2, -1):
        above = torch.maximum(top, block.amax(-1))
        total = total * torch.exp(top - above) + torch.exp(block - above[:, None]).sum(-1)
        top = above
    return top + total.log()


def _forced(h: Tensor, at: Tensor) -> Tensor:
    """Logits of which one index alone is left, as generation forces a token."""
    forced = torch.full_like(h, -INF)
    return torch.softmax(forced.scatter(-1, at, h.gather(-1, at)), -1)


def _aligned(h: Tensor) -> Tensor:
    """A target that is longer than its input: its loss is infinite, and set to zero."""
    log_p = h.float().log_softmax(-1)[:, None]
    lengths = torch.tensor([2]), torch.tensor([3])
    return ctc_loss(log_p[:2], torch.tensor([[1, 1, 1]]), *lengths, zero_infinity=True)


#: Programs of a 4 x 4 layer's result that requires a gradient, and what else they read.
MEANT: dict[str, tuple[Callable[..., Tensor], Tensor]] = {
    "a mask": (lambda h, mask: _attend(h, _scores(h).masked_fill(mask, -INF)), CAUSAL),
    "a mask that comes in": (
        lambda h, mask: _attend(h, _scores(h) + mask),
        ADDED,
    ),
    "a mask that is made inside": (lambda h, _: _attend(h, _scores(h) + torch.full((4, 4), -INF).triu(1)), CAUSAL),
    "a mask by where": (lambda h, mask: _attend(h, torch.where(mask, -INF, _scores(h))), CAUSAL),
    "a mask that is written": (lambda h, mask: _attend(h, _scores(h).clone().masked_fill_(mask, -INF)), CAUSAL),
    "a mask of the lowest number": (
        lambda h, mask: _attend(h, _scores(h) + mask * torch.finfo(torch.float32).min),
        CAUSAL.float(),
    ),
    "two masks": (lambda h, mask: _attend(h, (_scores(h) + mask) + mask), ADDED),
    "a mask and a bias by distance": (
        lambda h, mask: _attend(h, _scores(h) * 0.5 - torch.arange(4) * 0.1 + mask),
        ADDED,
    ),
    "a row without any place, replaced": (
        lambda h, mask: _attend(h, torch.where(mask.all(-1, keepdim=True), 0.0, _scores(h).masked_fill(mask, -INF))),
        ONE_ROW,
    ),
    "attention": (lambda h, mask: scaled_dot_product_attention(h[None], h[None], h[None], attn_mask=~mask), CAUSAL),
    "causal attention": (lambda h, _: scaled_dot_product_attention(h[None], h[None], h[None], is_causal=True), CAUSAL),
    "attention with a mask of numbers": (
        lambda h, mask: scaled_dot_product_attention(h[None], h[None], h[None], attn_mask=mask.to(h.dtype)),
        ADDED,
    ),
    "a layer of torch": (lambda h, _: _encoded(h), CAUSAL),
    "masked logits that are returned": (lambda h, mask: h.masked_fill(mask, -INF), CAUSAL),
    "log_softmax of a mask": (
        lambda h, mask: torch.where(mask, 0.0, h.masked_fill(mask, -INF).log_softmax(-1)),
        CAUSAL,
    ),
    "logsumexp of a mask": (lambda h, mask: h.masked_fill(mask, -INF).logsumexp(-1), CAUSAL),
    "the largest of a mask": (lambda h, mask: h.masked_fill(mask, -INF).amax(-1), CAUSAL),
    "the smallest of a mask": (lambda h, mask: h.masked_fill(mask, INF).min(-1).values, CAUSAL),
    "the best two of a mask": (lambda h, mask: h.masked_fill(mask, -INF)[1:].topk(2).values, CAUSAL),
    "sigmoid of a mask": (lambda h, mask: torch.sigmoid(h.masked_fill(mask, -INF)), CAUSAL),
    "weights of a mask": (lambda h, mask: torch.exp(h.masked_fill(mask, -INF)) @ h, CAUSAL),
    "a loss of a mask": (lambda h, mask: cross_entropy(h.masked_fill(mask, -INF), torch.zeros(4).long()), CAUSAL),
    "a nucleus": (lambda h, _: _nucleus(h), CAUSAL),
    "a forced token": (_forced, torch.tensor([[1], [2], [0], [3]])),
    "a running maximum": (lambda h, _: _running_softmax(h), CAUSAL),
    "the logarithm of zero in a where": (lambda h, zero: torch.where(zero > 0, torch.log(zero), h), torch.eye(4)),
    "a division by zero in a where": (lambda h, zero: torch.where(zero > 0, 1 / zero, h), torch.eye(4)),
    "a NaN in a where": (lambda h, x: torch.where(torch.isnan(x / x), h, x / x), torch.eye(4)),
    "a root of less than zero in a where": (lambda h, x: torch.where(x >= 0, x.sqrt(), h), -torch.eye(4)),
    "nan_to_num": (lambda h, x: h * torch.nan_to_num(x / x), torch.eye(4)),
    "a clamped infinity": (lambda h, x: h + torch.log(x).clamp(min=-10), torch.eye(4)),
    "a quotient that is zero": (lambda h, x: h + 1 / (1 / x), torch.eye(4)),
    "exp of a logarithm of zero": (lambda h, x: h + torch.log(x).exp(), torch.eye(4)),
    "a test for infinities": (lambda h, x: torch.where(torch.isinf(x), h, h + 1), torch.eye(4).log()),
    "a test for NaN": (lambda h, x: torch.where(torch.isnan(x), h, h + 1), torch.eye(4) / torch.eye(4)),
    "a test of each row": (lambda h, x: h * torch.isfinite(x).all(-1, keepdim=True), torch.eye(4).log()),
    "infinite padding that is cut off": (
        lambda h, x: h + x[:, :4],
        torch.ones(4, 6).index_fill(1, torch.tensor(5), INF),
    ),
    "an infinite threshold": (lambda h, x: torch.where(h < x, h, 0.0), torch.full((4,), INF)),
    "an infinite bound": (lambda h, x: torch.minimum(h, x), torch.full((4,), INF)),
    "entropy": (lambda h, p: (torch.special.entr(p) * h).sum(), torch.eye(4)),
    "zero times the logarithm of zero": (lambda h, p: torch.xlogy(p, p) + h, torch.eye(4)),
    "a distance of distributions": (lambda h, p: kl_div(h.log_softmax(-1), p, reduction="sum"), torch.eye(4)),
    "a likelihood with ignored rows": (
        lambda h, mask: nll_loss(h.masked_fill(mask, -INF).log_softmax(-1), torch.tensor([0, -100, 1, -100])),
        CAUSAL,
    ),
    "a target that is too long": (lambda h, _: _aligned(h), CAUSAL),
    "Gumbel noise": (lambda h, _: gumbel_softmax(h, hard=True), CAUSAL),
}


@pytest.mark.parametrize("lowering", exhaustive(["eager", "aot_eager"], always=["eager"]))
@pytest.mark.parametrize("policy", exhaustive(["cpu-float16", "cpu-bfloat16", "auto"], always=["cpu-float16"]))
@pytest.mark.parametrize("case", exhaustive(MEANT, always=list(MEANT)[::5]))
def test_what_is_meant_is_no_alarm(case: str, policy: str, lowering: str) -> None:
    program, more = MEANT[case]
    torch.manual_seed(0)
    model = compile_with(Layer(4, program), lowering, policy=policy, nonfinite="raise")
    torch.manual_seed(1)
    result = model(torch.randn(4, 4), more)
    torch.where(torch.isfinite(result), result, 0.0).float().sum().backward()
    assert fxamp.report(model).nonfinite == ()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


AT = torch.tensor([[0, 1], [1, 2], [2, 3], [0, 3]])

#: Parts of a 4 x 4 value, and other arrangements of its elements.
SELECTIONS: dict[str, Callable[[Tensor], Any]] = {
    "slice": lambda s: s[:, 1:],
    "row": lambda s: s[0],
    "slice of a slice": lambda s: s[1:][:, 1:].clone(),
    "split": lambda s: s.split(2, 1),
    "hsplit": lambda s: s.hsplit(2),
    "unbind": lambda s: s.unbind(0),
    "rows by index": lambda s: s[torch.tensor([0, 2])],
    "gather": lambda s: s.gather(1, AT),
    "take_along_dim": lambda s: s.take_along_dim(AT, 1),
    "take": lambda s: s.take(AT),
    "masked_select": lambda s: s.masked_select(~CAUSAL.T),
    "diagonal": lambda s: s.diagonal(1),
    "unfold": lambda s: s.unfold(1, 2, 1),
    "flip": lambda s: (s.fliplr(), s.rot90(), s.roll(1, 0)),
    "repeat_interleave": lambda s: s.repeat_interleave(2, 0),
    "sort": lambda s: (s.msort(), s.sort().values, s.kthvalue(1).values, s.median(1).values),
    "running minimum": lambda s: (s.cummin(1).values, s.cummax(1).values),
    "extremes": lambda s: (torch.fmax(s, s), *s.aminmax(dim=0)),
    "scatter": lambda s: s.index_copy(0, torch.tensor([1]), s[:1]).diagonal_scatter(torch.ones(4)),
    "infinity as a tensor": lambda s: torch.index_put(s, (AT[0],), torch.tensor(-INF, dtype=s.dtype)),
}


@pytest.mark.parametrize("lowering", exhaustive(["eager", "aot_eager"], always=["eager"]))
@pytest.mark.parametrize("case", exhaustive(SELECTIONS, always=list(SELECTIONS)[::5]))
def test_a_part_of_a_mask_is_no_alarm_and_one_of_an_overflow_names_what_overflowed(case: str, lowering: str) -> None:
    select = SELECTIONS[case]
    torch.manual_seed(0)
    for program, op in ((lambda h, mask: h.masked_fill(mask, -INF), None), (_overflowed, "aten::exp.default")):
        plain = Layer(4, lambda h, mask, program=program: select(program(h, mask)))
        model = compile_with(plain, lowering, policy="auto", nonfinite="log")
        results = zip(
            *map(tree_leaves, (plain(torch.ones(4, 4), CAUSAL), model(torch.ones(4, 4), CAUSAL))), strict=True
        )
        assert any(torch.equal(a.isinf(), b.isinf()) and a.isinf().any() for a, b in results)
        assert [found.op for found in fxamp.report(model).nonfinite] == ([op] if op else [])


def _overflowed(h: Tensor, mask: Tensor) -> Tensor:
    return torch.exp(h.masked_fill(mask, 1e3))
