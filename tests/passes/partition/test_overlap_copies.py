"""overlap-copies on a tiny forward and its backward: golden, few copies, none, and running twice."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from support.checks.golden_text import assert_golden
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fxamp.graph import format_graph
from fxamp.passes.partition.overlap_copies import OverlapCopies
from fxamp.pipeline import run_traced
from fxamp.policy import Policy

POLICY, CPU = Policy.load("cpu-bfloat16"), torch.device("cpu")
OPS, aten = torch.ops.fxamp, torch.ops.aten


def sent(value: Tensor) -> Tensor:
    host: Tensor = OPS.send_to_host(value, [])
    OPS.await_copies([host], CPU, [value])
    return aten.unsqueeze(host, 0)


def taken(host: Tensor) -> Tensor:
    value: Tensor = OPS.take_from_host(host, CPU, [])
    OPS.await_copies([value], CPU, [host])
    return value


def forward(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    first = aten.mm(x, y)
    one = sent(first)
    second = aten.mm(first, y)
    two = sent(second)
    third = aten.tanh(second)
    three = sent(third)
    return aten.sum(third), one, two, three


def backward(three: Tensor, two: Tensor, one: Tensor, gradient: Tensor) -> Tensor:
    gradient = gradient * (1 - taken(three) ** 2)
    gradient = aten.mm(gradient, taken(two))
    product: Tensor = aten.mm(gradient, taken(one))
    return product


def no_copies(x: Tensor, y: Tensor) -> Tensor:
    product: Tensor = aten.mm(x, y)
    return product


def one_copy(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    product = aten.mm(x, y)
    host = sent(product)
    return aten.mm(product, y), host


def one_copy_back(x: Tensor, host: Tensor) -> Tensor:
    product: Tensor = aten.mm(aten.mm(x, x), taken(host))
    return product


def run(program: Callable[..., Any]) -> tuple[GraphModule, str]:
    """The graph of ``program`` after the pass, and its text before and after; the results are the same."""
    generator = torch.Generator().manual_seed(0)
    names = program.__code__.co_varnames[: program.__code__.co_argcount]
    in_front = dict.fromkeys(("one", "two", "three", "host"), (1,))
    inputs = [torch.randn(*in_front.get(name, ()), 4, 4, generator=generator) for name in names]
    gm: GraphModule = make_fx(program, tracing_mode="fake")(*inputs)
    before, expected = format_graph(gm), program(*inputs)
    run_traced(gm, POLICY, OverlapCopies())
    assert_equal(gm(*inputs), expected)
    after = format_graph(gm)
    run_traced(gm, POLICY, OverlapCopies())
    assert format_graph(gm) == after, "twice is once"
    return gm, f"before\n{before}\n\nafter\n{after}"


@pytest.mark.parametrize("program", [forward, backward])
def test_golden(program: Callable[..., Any]) -> None:
    assert_golden(f"passes/overlap-copies-{program.__name__}", run(program)[1])


def test_without_copies_nothing_changes() -> None:
    before, _, after = run(no_copies)[1].partition("\n\nafter\n")
    assert before == f"before\n{after}"


def test_a_single_copy_has_the_rest_of_the_graph() -> None:
    gm, _ = run(one_copy)
    *_, wait, view, output = gm.graph.nodes
    assert wait.target is OPS.await_copies.default and view.target is aten.unsqueeze.default and output.op == "output"
    gm, _ = run(one_copy_back)
    places = {str(node.target): at for at, node in enumerate(gm.graph.nodes)}
    assert places["fxamp.take_from_host.default"] == 2, "it begins before everything else"
    wait = gm.graph.find_nodes(op="call_function", target=OPS.await_copies.default)[0]
    assert wait.next.target is aten.mm.default, "it is awaited by its reader"


def test_each_copy_names_what_the_one_before_reads_and_writes() -> None:
    """Nothing frees or overwrites these before the copy is awaited."""
    gm, _ = run(forward)
    sends = gm.graph.find_nodes(op="call_function", target=OPS.send_to_host.default)
    assert [send.args[1] for send in sends] == [[], *([send, send.args[0]] for send in sends[:-1])]
    gm, _ = run(backward)
    takes = gm.graph.find_nodes(op="call_function", target=OPS.take_from_host.default)
    waits = gm.graph.find_nodes(op="call_function", target=OPS.await_copies.default)
    assert [take.args[2] for take in takes] == [[], [takes[0]], [takes[1]]]
    assert [(wait.args[0], wait.args[2][0]) for wait in waits] == [([take], take.args[0]) for take in takes]
    assert [later.prev for later in takes[1:]] == waits[:-1], "a copy begins when the one before is there"
