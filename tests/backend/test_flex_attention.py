"""flex_attention runs in the dtype of query, key and value, as under autocast. torch has no backward of it on a CPU."""

import pytest
import torch
from support.oracles.like_autocast import compile_with
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import fxamp

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


class Attention(nn.Module):
    """``biased``: the scores read a parameter. ``mixed``: the query stays in float32 under autocast."""

    def __init__(self, biased: bool = False, mixed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts, self.out, self.bias = nn.Linear(32, 96), nn.Linear(32, 32), nn.Parameter(torch.randn(2))
        self.biased, self.mixed = biased, mixed

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.parts(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4).unbind(0)
        if self.mixed:
            query = query + self.bias.repeat(8)
        result = flex_attention(query, key, value, score_mod=self.changed if self.biased else None)
        return self.out(result.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def changed(self, score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + self.bias[head] * (query - key)


@pytest.mark.parametrize("biased", [False, True])
def test_the_result_is_that_of_eager_autocast(biased: bool) -> None:
    model, x = Attention(biased).eval(), torch.randn(2, 128, 32, generator=torch.Generator().manual_seed(1))
    compiled = compile_with(model)
    with torch.no_grad():
        result = compiled(x)
        with torch.autocast("cpu", torch.bfloat16):
            expected = model(x)
    assert torch.equal(result, expected.float())
    assert _dtype_of_attention(compiled) == "bf16"


def test_a_query_in_float32_keeps_all_in_float32() -> None:
    """Under autocast torch refuses operands of several dtypes."""
    compiled = compile_with(Attention(mixed=True).eval())
    with torch.no_grad():
        compiled(torch.randn(2, 128, 32))
    assert _dtype_of_attention(compiled) == "f32"


def _dtype_of_attention(compiled: object) -> str:
    (graph,) = fxamp.report(compiled).graphs
    (entry,) = [entry for entry in graph.listing.entries if entry.target == "higher_order::flex_attention"]
    return entry.values[0].dtype
