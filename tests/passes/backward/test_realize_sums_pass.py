"""The pass realize-sums on tiny backward graphs of an absent GPU."""

import pytest
import torch
from golden_text import assert_golden
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

from fxamp.capture import Captured
from fxamp.graph import GraphWriter, format_graph
from fxamp.passes.backward.realize_sums import RealizeSums
from fxamp.passes.base import Context
from fxamp.pipeline import run_passes

aten = torch.ops.aten


def graph(
    addends: int = 4,
    device: str = "meta",
    dtype: torch.dtype = torch.float32,
    readers: int = 2,
    shared: bool = False,
    rows: int = 3 * 2**20,
) -> tuple[GraphModule, Context]:
    """A sum of gradients that so many ops read; with ``shared``, another op reads what is summed before the last."""
    mode = FakeTensorMode()
    made = Graph()
    gradients = [made.placeholder(f"gradient_{at}") for at in range(addends)]
    for gradient in gradients:
        with mode:
            gradient.meta["val"] = torch.empty(2, rows, 1, dtype=dtype, device=device)
    writer = GraphWriter(made, mode)
    total = before = gradients[0]
    for gradient in gradients[1:]:
        before, total = total, writer.call(aten.add.Tensor, total, gradient)
    results = [writer.call(aten.sum.dim_IntList, total, [dim]) for dim in range(readers)]
    made.output((*results, *([writer.call(aten.neg.default, before)] if shared else [])))
    return GraphModule(torch.nn.Module(), made), Context(mode)


def test_what_is_written() -> None:
    gm, context = graph()
    (record,) = run_passes(Captured(gm, context.mode), context, RealizeSums())
    assert record.modified == 1
    assert_golden("backward/realize-sums", format_graph(gm))


def test_a_second_run_changes_nothing() -> None:
    gm, context = graph()
    assert [RealizeSums().run(gm, context).modified for _ in range(2)] == [1, 0]
    assert RealizeSums().ensures(gm, context) is None


@pytest.mark.parametrize(
    "given",
    [{"addends": 3}, {"device": "cpu"}, {"dtype": torch.bfloat16}, {"readers": 1}, {"shared": True}, {"rows": 2**20}],
    ids=str,
)
def test_others_stay_as_they_are(given: dict[str, object]) -> None:
    gm, context = graph(**given)  # type: ignore[arg-type]
    before = format_graph(gm)
    assert RealizeSums().run(gm, context).modified == 0 and format_graph(gm) == before


def test_no_value_changes() -> None:
    gm, context = graph()
    given = torch.randn(4, 2, 3 * 2**20, 1)
    wanted = gm(*given)
    RealizeSums().run(gm, context)
    for got, want in zip(gm(*given), wanted, strict=True):
        assert torch.equal(got, want) and got.stride() == want.stride()


def test_its_promise_is_checked() -> None:
    gm, context = graph()
    assert "not realized: add" in str(RealizeSums().ensures(gm, context))
