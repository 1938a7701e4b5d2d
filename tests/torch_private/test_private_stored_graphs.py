"""A graph comes back from bytes as it was, or is refused."""

import threading

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxamp import torch_private as private
from fxamp.torch_private import stored_graphs


def test_a_graph_is_stored_with_values_and_annotations() -> None:
    mode = FakeTensorMode()
    with mode:
        inputs = [torch.ones(3, 4), torch.empty_strided((2, 4), (1, 2))]
    gm = make_fx(lambda x, y: x.sum() * y, tracing_mode="fake")(*inputs)
    for node in gm.graph.nodes:
        node.meta.update(nn_module_stack={"1": ("L['self'].head", nn.Linear)}, source_fn_stack=threading.Lock())
    loaded, examples = private.load_graph(private.dump_graph(gm, inputs), FakeTensorMode())
    assert stored_graphs._text(loaded) == stored_graphs._text(gm)
    assert [value.stride() for value in examples] == [value.stride() for value in inputs]
    kind = stored_graphs._qualified(nn.Linear)
    assert all(node.meta["nn_module_stack"] == {"1": ("L['self'].head", kind)} for node in loaded.graph.nodes)
    assert torch.equal(loaded(torch.ones(3, 4), torch.ones(2, 4)), torch.full((2, 4), 12.0))


def test_a_constant_is_stored_while_a_fake_mode_is_on() -> None:
    constant = torch.tensor([2.0, 3.0])
    gm = make_fx(lambda x: x * constant)(torch.ones(2))
    with FakeTensorMode():
        stored = private.dump_graph(gm, [])
    loaded, _ = private.load_graph(stored, FakeTensorMode())
    assert loaded(torch.ones(2)).tolist() == [2, 3]


def test_a_view_is_stored_with_its_layout() -> None:
    with FakeTensorMode():
        view = torch.ones(50)[2:].as_strided((3, 4), (1, 3), 5)
    gm = make_fx(lambda x: x * 2, tracing_mode="fake")(view)
    (before,) = gm.graph.find_nodes(op="placeholder")
    before.meta["val"] = view
    mode = FakeTensorMode()
    loaded, examples = private.load_graph(private.dump_graph(gm, [view]), mode)
    (after,) = loaded.graph.find_nodes(op="placeholder")
    for value in (*examples, after.meta["val"]):
        assert (value.shape, value.stride(), value.storage_offset()) == ((3, 4), (1, 3), 5)
        assert value.fake_mode is mode and not value._is_view()


def test_values_of_one_storage_are_stored_so() -> None:
    """Inductor's pass that writes in place looks at storages."""
    with FakeTensorMode():
        inputs = [torch.ones(3, 4), torch.ones(8, dtype=torch.int32)]
    gm = make_fx(lambda x, y: (x.t(), x * 2, y[2:], y.view(torch.float32)), tracing_mode="fake")(*inputs)
    loaded, examples = private.load_graph(private.dump_graph(gm, inputs), FakeTensorMode())

    def storages(graph: torch.fx.GraphModule) -> list[tuple[int, int]]:
        memory = [node.meta["val"].untyped_storage() for node in graph.graph.nodes if node.op != "output"]
        first = [storage._cdata for storage in memory]
        return [(first.index(storage._cdata), storage.nbytes()) for storage in memory]

    assert storages(loaded) == storages(gm)
    assert len(set(storages(gm))) == 3
    assert [value.untyped_storage().nbytes() for value in examples] == [48, 32]


def test_a_graph_of_dynamic_sizes_is_not_stored() -> None:
    gm = make_fx(lambda x: x * x.shape[0], tracing_mode="symbolic")(torch.ones(3, 4))
    (before,) = gm.graph.find_nodes(op="placeholder")
    assert private.is_dynamic(before.meta["val"]) and not private.is_dynamic(torch.ones(2))
    with pytest.raises(ValueError, match="dynamic sizes"):
        private.dump_graph(gm, [])


def test_a_graph_that_is_not_restored_as_it_was_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = private.dump_graph(make_fx(lambda x: x * 2)(torch.ones(2)), [])
    monkeypatch.setattr(stored_graphs, "_text", lambda _: "other")
    with pytest.raises(ValueError, match="not restored as it was"):
        private.load_graph(stored, FakeTensorMode())
