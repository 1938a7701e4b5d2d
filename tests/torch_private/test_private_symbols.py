"""Sizes that depend on values are noted in torch as fxamp takes them to be."""

from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from fxamp import torch_private as private
from fxamp.policy.model.comparisons import holds


def _mode() -> FakeTensorMode:
    return FakeTensorMode(shape_env=ShapeEnv())


def _nonzero(mode: FakeTensorMode) -> tuple[GraphModule, Tensor]:
    with mode:
        x = torch.ones(4)
        return make_fx(lambda x: x.nonzero())(x), torch.ones(4)


def test_another_value_gets_the_names_of_the_sizes_before() -> None:
    mode = _mode()
    gm, again = _nonzero(mode)
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.nonzero.default)
    with mode, private.dropped_sizes(mode.shape_env):
        value = again.nonzero()
        assert str(value.shape[0]) != str(node.meta["val"].shape[0])
        private.rebind_sizes(node, value)
    assert str(value.shape[0]) == str(node.meta["val"].shape[0])


def test_sizes_of_another_trace_keep_their_names() -> None:
    gm, _ = _nonzero(_mode())
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.nonzero.default)
    other = _mode()
    _nonzero(other)
    with other:
        value = torch.ones(4).nonzero()
    name = str(value.shape[0])
    private.rebind_sizes(node, value)
    assert str(value.shape[0]) == name


def test_dropped_sizes_are_not_missed_by_who_traces_next() -> None:
    """Else the next trace raises PendingUnbackedSymbolNotFound."""
    mode = _mode()
    with mode, private.dropped_sizes(mode.shape_env):
        torch.ones(4).nonzero()
    _nonzero(mode)
    with private.dropped_sizes(None):
        pass


def test_questions_about_sizes_that_depend_on_values_are_answered_in_a_block_alone() -> None:
    mode = _mode()
    with mode, private.dropped_sizes(mode.shape_env):
        size = torch.ones(4).nonzero().shape[0]
        with private.size_oblivious(mode.shape_env):
            assert not bool(size == 0) and not bool(size == 1)
        with pytest.raises(GuardOnDataDependentSymNode):
            bool(size == 0)
    with private.size_oblivious(None):
        pass


def test_a_tracer_notes_the_nodes_of_sizes_in_order() -> None:
    lengths: list[tuple[int, ...]] = []

    def traced(x: Tensor) -> Any:
        mode = get_proxy_mode()
        assert mode is not None
        lengths.append(tuple(map(len, private.size_tables(mode.tracer))))
        y = x.nonzero()
        lengths.append(tuple(map(len, private.size_tables(mode.tracer))))
        return y * y.shape[0]

    mode = _mode()
    with mode:
        make_fx(traced)(torch.ones(4))
    before, after = lengths
    assert all(a > b for a, b in zip(after, before, strict=True))


def test_a_size_is_read_from_the_inputs_of_a_run() -> None:
    gm = make_fx(lambda x: x.nonzero(), tracing_mode="symbolic")(torch.ones(4, 6))
    x, unbacked = (node.meta["val"] for node in list(gm.graph.nodes)[:2])
    rows = x.shape[0]
    assert isinstance(rows, torch.SymInt)
    readers = [private.size_reader(size, [None, x]) for size in (3, rows, 2 * rows - 1)]
    run = [None, torch.ones(5, 6)]
    assert [read(run) for read in readers if read is not None] == [3, 5, 9]
    of_numbers = private.size_reader(rows, [rows])
    assert of_numbers is not None and of_numbers([7]) == 7
    assert private.size_reader(rows, []) is None and private.size_reader(unbacked.shape[0], [x]) is None


def test_guards_on_ragged_sizes_go_and_others_stay() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    assert mode.shape_env is not None
    values, offsets = mode.from_tensor(torch.ones(4, 3), static_shapes=False), mode.from_tensor(torch.tensor([0, 1, 4]))
    with mode:
        ragged = torch.nested.nested_tensor_from_jagged(values, offsets).shape[1]
        assert bool(ragged != 1) and bool(values.shape[0] != 3)
        unbacked = torch.ones(4).nonzero().shape[0]
    of_values = mode.shape_env.guards[0]._replace(expr=sympy.Ne(unbacked.node.expr, 3))
    mode.shape_env.guards.append(of_values)
    before = {str(guard.expr) for guard in mode.shape_env.guards}
    private.drop_guards_on_ragged_sizes(mode.shape_env)
    after = {str(guard.expr) for guard in mode.shape_env.guards}
    of_ragged = [guard for guard in before if str(ragged.node.expr) in guard]
    assert len(of_ragged) == holds("<2.15", torch.__version__), "torch 2.15 makes no guards on ragged sizes"
    assert before - after == {*of_ragged} and str(of_values.expr) in after and len(after) > 1
    private.drop_guards_on_ragged_sizes(None)
