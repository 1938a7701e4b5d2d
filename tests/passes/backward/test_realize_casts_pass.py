"""The pass realize-casts on tiny backward graphs of an absent GPU, and by what Inductor makes of them there."""

import pytest
import torch
from golden_text import assert_golden
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

from fxamp.capture import Captured
from fxamp.graph import GraphWriter, format_graph
from fxamp.passes.backward.realize_casts import RealizeCasts
from fxamp.passes.base import Context
from fxamp.pipeline import run_passes

aten, prims = torch.ops.aten, torch.ops.prims


def graph(
    device: str, shape: tuple[int, ...], dtype: torch.dtype, also_read: bool = False, source_read: bool = True
) -> tuple[GraphModule, Context]:
    """A gradient of this shape, cast to 16 bits, and read through a view; by another op, if ``also_read``."""
    mode = FakeTensorMode()
    made = Graph()
    gradient = made.placeholder("gradient")
    with mode:
        gradient.meta["val"] = torch.empty(shape, dtype=dtype, device=device)
    writer = GraphWriter(made, mode)
    doubled = writer.call(aten.mul.Tensor, gradient, 2)
    cast = writer.call(prims.convert_element_type.default, doubled, torch.float16)
    view = writer.call(aten.view.default, cast, [-1, shape[-1]])
    written = [doubled] if source_read else []
    results = [*written, view, *([writer.call(aten.neg.default, cast)] if also_read else [])]
    made.output(tuple(results))
    return GraphModule(torch.nn.Module(), made), Context(mode)


def test_what_is_written() -> None:
    gm, context = graph("meta", (2, 3, 4), torch.float32)
    (record,) = run_passes(Captured(gm, context.mode), context, RealizeCasts())
    assert record.modified == 1
    assert_golden("backward/realize-casts", format_graph(gm))


def test_a_second_run_changes_nothing() -> None:
    gm, context = graph("meta", (2, 3, 4), torch.float32)
    assert [RealizeCasts().run(gm, context).modified for _ in range(2)] == [1, 0]
    assert RealizeCasts().ensures(gm, context) is None


@pytest.mark.parametrize(
    ("device", "shape", "dtype", "also_read"),
    [
        ("cpu", (2, 3, 4), torch.float32, False),
        ("meta", (3, 4), torch.float32, False),
        ("meta", (2, 3, 4), torch.bfloat16, False),
        ("meta", (2, 3, 4), torch.float32, True),
    ],
)
def test_others_stay_as_they_are(device: str, shape: tuple[int, ...], dtype: torch.dtype, also_read: bool) -> None:
    gm, context = graph(device, shape, dtype, also_read)
    before = format_graph(gm)
    assert RealizeCasts().run(gm, context).modified == 0 and format_graph(gm) == before


def test_a_source_that_no_kernel_writes_stays_as_it_is() -> None:
    gm, context = graph("meta", (2, 3, 4), torch.float32, source_read=False)
    before = format_graph(gm)
    assert RealizeCasts().run(gm, context).modified == 0 and format_graph(gm) == before


def test_no_value_changes() -> None:
    gm, context = graph("meta", (2, 3, 4), torch.float32)
    given = torch.randn(2, 3, 4)
    wanted = gm(given)
    RealizeCasts().run(gm, context)
    for got, want in zip(gm(given), wanted, strict=True):
        assert torch.equal(got, want) and got.stride() == want.stride()


def test_its_promise_is_checked() -> None:
    gm, context = graph("meta", (2, 3, 4), torch.float32)
    assert "not realized: convert_element_type" in str(RealizeCasts().ensures(gm, context))
