"""unpack-kept on small backwards: what they take, where values are restored, and who reads codes instead."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.checks.bench_graph import assert_unchanged
from support.checks.golden_text import assert_golden
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fxamp.graph import format_graph, graph_output
from fxamp.passes.base import CastContext
from fxamp.passes.partition.pack_kept import RESTORE, PackKept
from fxamp.passes.partition.unpack_kept import UnpackKept
from fxamp.passes.shared.saved_values import saved
from fxamp.policy import Policy, Rule

aten = torch.ops.aten


def partition(
    forward: Callable[..., Any], backward: Callable[..., Any], keep: str, elements: str = ">=1"
) -> tuple[GraphModule, UnpackKept, CastContext]:
    """The backward of a packed forward of one result, and the pass for it."""
    rule = Rule("all", keep=keep, region="kept", elements=elements, block=16)  # type: ignore[arg-type]
    policy, mode = Policy.load("cpu-bfloat16"), FakeTensorMode()
    context = CastContext(mode, replace(policy, rules=(*policy.rules, rule)))
    x = mode.from_tensor(torch.ones(32, 32))
    first = make_fx(forward)(x)
    with mode:
        second = make_fx(backward)(*(node.meta["val"] for node in saved(first, 1)), x)
    originals = tuple(saved(first, 1))
    PackKept(1).run(first, context)
    return second, UnpackKept(originals, graph_output(first.graph).meta[RESTORE], tuple(saved(first, 1))), context


def masked(keep: str) -> tuple[GraphModule, UnpackKept, CastContext]:
    """A relu whose result a product and a comparison read in the backward."""

    def forward(x: Tensor) -> Any:
        y = aten.relu.default(aten.mm.default(x, x))
        return y.sum(), y

    def backward(y: Tensor, gradient: Tensor) -> Any:
        return aten.mm.default(y, gradient), aten.where.self(aten.le.Scalar(y, 0), aten.zeros_like(gradient), gradient)

    return partition(forward, backward, keep)


@pytest.mark.parametrize("keep", ["int8", "float8_e4m3fn"])
def test_a_value_is_restored_once_and_its_sign_read_from_the_codes_of_floats(keep: str) -> None:
    backward, unpack, context = masked(keep)
    before = format_graph(backward.graph)
    assert unpack.requires(backward, context) is None
    assert unpack.run(backward, context).modified == 1
    assert_golden(f"passes/unpack-kept-{keep}", f"before\n{before}\n\nafter\n{format_graph(backward.graph)}")
    assert unpack.requires(backward, context) is not None, "a second run is refused: the values are unpacked"


def test_where_nothing_is_packed_nothing_changes() -> None:
    backward, unpack, context = partition(
        lambda x: (x.sum(), aten.mm.default(x, x)), lambda y, g: (aten.mm.default(y, g),), "int8", ">=4096"
    )
    assert_unchanged(backward, context, unpack)
