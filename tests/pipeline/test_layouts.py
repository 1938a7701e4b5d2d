"""After every pass over a traced graph, its ops read the strides that it was traced with."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import fxamp.passes.backward
import fxamp.passes.partition
from fxamp.capture import Captured
from fxamp.errors import PassError
from fxamp.graph import GraphWriter
from fxamp.graph.tensor_wrappers import mode_of
from fxamp.passes.base import Context, Pass, Result, TracedPass
from fxamp.pipeline import layouts, run_passes

aten = torch.ops.aten


@dataclass(frozen=True)
class Replace(TracedPass[Context]):
    """Replaces each call of ``op`` by what ``write`` makes of its first argument."""

    op: Any
    write: Callable[[GraphWriter, Node], Node]
    kernels_only: bool = False
    name = "replace"

    def relies(self, reader: Node) -> bool:
        return not self.kernels_only

    def run(self, gm: GraphModule, context: Context) -> Result:
        nodes = gm.graph.find_nodes(op="call_function", target=self.op)
        for node in nodes:
            with gm.graph.inserting_before(node):
                node.replace_all_uses_with(self.write(GraphWriter(gm.graph, context.mode), node.args[0]))
            gm.graph.erase_node(node)
        return Result(len(nodes))


def first(writer: GraphWriter, node: Node) -> Node:
    """The argument itself, as where zeros were added to it."""
    return node


def narrow(writer: GraphWriter, node: Node) -> Node:
    return writer.in_dtype(node, torch.bfloat16)


def dense(writer: GraphWriter, node: Node) -> Node:
    return writer.call(aten.clone.default, node, memory_format=torch.contiguous_format)


def longer(writer: GraphWriter, node: Node) -> Node:
    return writer.call(aten.cat.default, [node, node])


def traced(program: Callable[..., Any], *shape: int, symbolic: bool = False) -> GraphModule:
    return make_fx(program, tracing_mode="symbolic" if symbolic else "fake")(torch.empty(shape))


def run(gm: GraphModule, step: Pass[Context]) -> int:
    (record,) = run_passes(Captured(gm, mode_of(gm)), Context(mode_of(gm)), step)
    return record.counts.get("restored", 0)


def strides(gm: GraphModule, *targets: Any) -> list[list[tuple[Any, ...]]]:
    """The strides that the calls of ``targets`` and the output read, recomputed from those of the inputs."""
    with mode_of(gm):
        layouts = _Seen(gm, targets)
        layouts.run(*(node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")))
    return layouts.strides


class _Seen(torch.fx.Interpreter):
    def __init__(self, gm: GraphModule, targets: tuple[Any, ...]) -> None:
        super().__init__(gm)
        self.targets, self.strides = targets, []

    def run_node(self, n: Node) -> Any:
        if n.op == "output" or n.target in self.targets:
            self.strides.append([self.env[source].stride() for source in n.all_input_nodes])
        return super().run_node(n)


def spread(x: Tensor) -> Tensor:
    """A sum makes an expanded value dense; a view and a kernel read it."""
    return aten.view.default(aten.neg.default(x.expand(4, 3, 8)), [-1])


def permuted(x: Tensor) -> Any:
    return aten.neg.default(x.transpose(0, 1)).transpose(0, 1).contiguous() + 1


def output_alone(x: Tensor) -> Tensor:
    return aten.neg.default(x.expand(4, 3, 8))


@pytest.mark.parametrize("program", [spread, output_alone])
def test_an_expanded_value_in_the_place_of_a_dense_one_becomes_dense(program: Callable[..., Any]) -> None:
    gm = traced(program, 3, 1)
    before = strides(gm, aten.view.default)
    assert run(gm, Replace(aten.neg.default, first)) == 1
    assert strides(gm, aten.view.default) == before
    x = torch.randn(3, 1)
    assert torch.equal(gm(x), -program(x))


def test_a_dense_value_in_the_place_of_an_expanded_one_is_expanded() -> None:
    gm = traced(lambda x: (aten.neg.default(aten.alias.default(x.t().expand(4, 3, 8))),), 8, 3)
    before = strides(gm, aten.neg.default)
    assert run(gm, Replace(aten.alias.default, dense)) == 1
    assert strides(gm, aten.neg.default) == before == [[(0, 1, 3)], [(24, 1, 3)]]


def test_readers_share_a_copy_and_others_keep_what_they_read() -> None:
    def program(x: Tensor) -> Any:
        y = x.expand(4, 8)
        z = aten.neg.default(y)
        return aten.view.default(z, [-1]), aten.mm.default(z, z.t()), y.sum(0)

    gm = traced(program, 4, 1)
    before = strides(gm, aten.view.default, aten.mm.default, aten.sum.dim_IntList)
    assert run(gm, Replace(aten.neg.default, first)) == 1
    assert strides(gm, aten.view.default, aten.mm.default, aten.sum.dim_IntList) == before


def test_what_reads_another_dtype_is_computed_again_as_far_as_it_differs() -> None:
    gm = traced(lambda x: aten.sum.dim_IntList(aten.exp.default(aten.neg.default(x)), [0]), 4, 8)
    assert run(gm, Replace(aten.neg.default, narrow)) == 0
    assert {node.meta["val"].dtype for node in gm.graph.nodes if node.op == "call_function"} == {torch.bfloat16}


def test_windows_that_overlap_become_contiguous_but_not_for_ops_that_read_memory() -> None:
    gm = traced(lambda x: aten.exp.default(aten.alias.default(x.unfold(0, 3, 1))), 8)
    assert run(gm, Replace(aten.alias.default, dense)) == 0
    gm = traced(lambda x: aten.as_strided.default(aten.alias.default(x.unfold(0, 3, 1)), (2, 2), (1, 1)), 8)
    with pytest.raises(PassError, match=r"reads the memory of clone_default, which had strides \['1', '1'\]"):
        run(gm, Replace(aten.alias.default, dense))


def test_another_shape_is_an_error_of_the_pass() -> None:
    gm = traced(lambda x: aten.exp.default(aten.neg.default(x)), 4, 8)
    with pytest.raises(PassError, match=r"exp reads cat_default of shape \['8', '8'\], traced with \['4', '8'\]"):
        run(gm, Replace(aten.neg.default, longer))


def test_symbolic_sizes_get_no_guards() -> None:
    gm = traced(lambda x: aten.neg.default(x[:, None].expand(x.shape[0], 3, x.shape[1])).sum(0), 6, 8, symbolic=True)
    env = mode_of(gm).shape_env
    guards = len(env.guards)
    assert run(gm, Replace(aten.neg.default, first)) == 1 and len(env.guards) == guards
    x = torch.randn(5, 7)
    torch.testing.assert_close(gm(x), x[:, None].expand(5, 3, 7).sum(0))


def test_readers_that_do_not_rely_on_strides_are_left() -> None:
    gm = traced(spread, 3, 1)
    assert run(gm, Replace(aten.neg.default, first, kernels_only=True)) == 0


def test_attention_on_a_gpu_reads_its_gradient_as_traced() -> None:
    """Through fake tensors: the kernel demands that the last dimension is contiguous."""
    mode = FakeTensorMode()
    with mode:
        q = torch.empty(2, 2, 128, 64, dtype=torch.float16, device="cuda")
        gradient = torch.empty(2, 2, 1, 1, dtype=torch.float16, device="cuda")
        seed = torch.empty(2, dtype=torch.int64, device="cuda")
        sums = torch.empty(2, 2, 128, device="cuda")

    def backward(gradient: Tensor, q: Tensor, sums: Tensor, seed: Tensor) -> Any:
        dense = aten.neg.default(gradient.expand(2, 2, 128, 64))
        flash = aten._scaled_dot_product_flash_attention_backward.default
        return flash(dense, q, q, q, q, sums, None, None, 128, 128, 0.0, False, seed, seed)

    gm = make_fx(backward)(gradient, q, sums, seed)
    flash = aten._scaled_dot_product_flash_attention_backward.default
    before = strides(gm, flash)
    assert run(gm, Replace(aten.neg.default, first)) == 1
    assert strides(gm, flash) == before and before[0][0] == (16384, 8192, 64, 1)


def test_where_nothing_changes_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = traced(permuted, 4, 8)
    monkeypatch.setattr(layouts, "computed", None)
    assert run(gm, Replace(aten.mm.default, first)) == 0


def test_all_passes_over_partitioned_graphs_are_checked() -> None:
    modules = [
        importlib.import_module(f"{package.__name__}.{info.name}")
        for package in (fxamp.passes.backward, fxamp.passes.partition)
        for info in pkgutil.iter_modules(package.__path__)
    ]
    kinds = [kind for module in modules for _, kind in inspect.getmembers(module, inspect.isclass)]
    passes = {kind for kind in kinds if issubclass(kind, Pass) and not inspect.isabstract(kind)}
    assert len(passes) >= 8 and all(issubclass(kind, TracedPass) for kind in passes)
