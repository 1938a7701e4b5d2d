"""AOTAutograd's metadata and marks are as fxamp takes them to be."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import CompileContext, TracingContext, tracing
from torch._subclasses import FakeTensorMode

from fxamp import torch_private as private


def quadrupled(x: Tensor) -> Tensor:
    return x * 4


def test_a_graph_that_is_compiled_later_has_the_contexts_of_its_compilation() -> None:
    again: list[Any] = []

    def compiler(gm: Any, _: Any) -> Any:
        again.append((private.current_metadata(), CompileContext.try_get(), private.compiling_again()))
        return make_boxed_func(gm.forward)

    torch.compile(quadrupled, backend=aot_autograd(fw_compiler=compiler))(torch.ones(2, requires_grad=True))
    metadata, compilation, contexts = again[0]
    assert metadata is not None and compilation is not None and private.current_metadata() is None
    with torch.autocast("cpu"), contexts():
        assert private.current_metadata() is metadata and CompileContext.try_get() is compilation
        assert not torch.is_autocast_enabled("cpu") and torch.compiler.is_compiling()
    assert private.current_metadata() is None and CompileContext.try_get() is None


@pytest.mark.parametrize("keeps", [True, False])
def test_a_compiled_graph_has_metadata_and_keeps_what_it_saved_if_asked(keeps: bool) -> None:
    """If not asked, torch refuses ``retain_graph=True``: with that gone, there would be nothing to keep."""
    calls: list[Any] = []

    def forward(graph: torch.fx.GraphModule, _: Any) -> Any:
        calls.append(private.current_metadata())
        outputs = graph.graph.output_node().args[0]
        results = private.forward_results(outputs, calls[-1])
        assert [node.meta["val"].shape for node in results] == [torch.Size([3])] and len(outputs) > 1
        return make_boxed_func(graph.forward)

    def backward(graph: torch.fx.GraphModule, _: Any) -> Any:
        assert calls[-1].bw_donated_idxs
        if keeps:
            private.keep_saved_tensors()
        return make_boxed_func(graph.forward)

    assert private.current_metadata() is None
    x = torch.rand(3, requires_grad=True)
    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward)
    with functorch_config.patch(donated_buffer=True):
        run = torch.compile(lambda x: x.sin().exp().tanh(), backend=backend, fullgraph=True)
        run(x).sum().backward()  # compiles a backward that need not keep anything
        y = run(x)
        function = private.function_of(y.grad_fn)
        assert private.compiled_by_aot(function)
        assert private.subclass_metadata(function) is None and hasattr(function, "maybe_subclass_metadata")
        assert private.graph_metadata(function) == [calls[-1], None]
        with nullcontext() if keeps else pytest.raises(RuntimeError, match="retain_graph"):
            y.sum().backward(retain_graph=True)


def test_a_backward_that_is_compiled_late_finds_its_metadata() -> None:
    calls: list[Any] = []

    def compiler(gm: Any, _: Any) -> Any:
        again = private.compiling_again()

        def run(args: list[Any]) -> Any:
            if private.running_node() is not None:
                with again():
                    TracingContext.get().fw_metadata = None
                    with private.running_metadata():
                        calls.append((private.current_metadata(), private.donated_inputs()))
                    assert private.current_metadata() is None and private.donated_inputs() is None
            return gm.forward(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    y = torch.compile(quadrupled, backend=aot_autograd(fw_compiler=compiler))(torch.ones(2, requires_grad=True))
    metadata = private.graph_metadata(private.function_of(y.grad_fn))[0]
    metadata.bw_donated_idxs = [0]
    y.register_hook(lambda _: private.keep_saved_tensors(y.grad_fn))
    y.sum().backward(retain_graph=True)
    assert metadata.bw_donated_idxs == [] and [actual for actual, _ in calls] == [metadata]
    with tracing(TracingContext(FakeTensorMode())):
        TracingContext.get().fw_metadata = metadata
        private.keep_saved_tensors()
        with private.overwriting_saved():
            assert private.donated_inputs() == [0] and metadata.bw_donated_idxs == []
        assert private.donated_inputs() == [] and private.current_metadata() is metadata


def test_what_is_computed_again_is_not_kept() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    def dtypes_kept(again: bool) -> list[torch.dtype]:
        def program(x: Tensor) -> Tensor:
            with private.computed_again() if again else nullcontext():
                narrow = x.to(torch.float16)  # half of what x takes: the cheaper one to keep
            return (narrow @ narrow).float().sum()

        graphs.clear()
        compiled = aot_function(program, keep, keep, partition_fn=min_cut_rematerialization_partition)
        compiled(torch.ones(4, 4, requires_grad=True)).backward()
        (output,) = graphs[0].graph.find_nodes(op="output")
        return [node.meta["val"].dtype for node in output.args[0][1:]]

    assert dtypes_kept(again=False) == [torch.float16] and dtypes_kept(again=True) == [torch.float32]
    with private.computed_again():  # outside of tracing nothing happens
        assert not torch.fx.traceback.has_preserved_node_meta()


def test_what_is_kept_exactly_is_marked() -> None:
    marked: list[bool] = []

    def keep(gm: torch.fx.GraphModule, _: Any) -> Any:
        marked.extend(private.is_kept_exactly(n) for n in gm.graph.nodes if n.op == "call_function")
        return make_boxed_func(gm.forward)

    def program(x: Tensor) -> Tensor:
        with private.kept_exactly():
            y = x.sin()
        return y.cos()

    with torch.fx.traceback.preserve_node_meta():  # as while AOTAutograd traces what Dynamo captured
        aot_function(program, keep)(torch.ones(4))
    assert marked == [True, False]


def test_the_input_of_a_gradient_is_found() -> None:
    owners: list[int | None] = []

    def backward(graph: torch.fx.GraphModule, _: Any) -> Any:
        output = next(iter(graph.graph.find_nodes(op="output")))
        owners.extend(private.owner_of_gradient(text) for text in output.meta["desc"])
        return make_boxed_func(graph.forward)

    def forward(graph: torch.fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(graph.forward)

    def product(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return x * z * y.sum()

    x, y, z = torch.ones(2, requires_grad=True), torch.ones(2), torch.ones(2, requires_grad=True)
    torch.compile(product, backend=aot_autograd(fw_compiler=forward, bw_compiler=backward))(x, y, z).sum().backward()
    assert owners == [0, 1, None] and private.owner_of_gradient(None) is None


def test_written_input_names_the_input_that_a_result_replaces() -> None:
    found: list[Any] = []

    def partition(graph: torch.fx.GraphModule, inputs: Any, **settings: Any) -> Any:
        output = next(iter(graph.graph.find_nodes(op="output")))
        described = [node.meta["desc"] for node in graph.graph.find_nodes(op="placeholder")]
        written = [private.written_input(text) for text in output.meta["desc"]]
        found.extend(described.index(text) for text in written if text is not None)
        return min_cut_rematerialization_partition(graph, inputs, **settings)

    def doubled(x: Tensor, y: Tensor) -> Tensor:
        return y.mul_(2) * x

    def forward(graph: torch.fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(graph.forward)

    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True) * 1
    torch.compile(doubled, backend=aot_autograd(fw_compiler=forward, partition_fn=partition))(x, y)
    assert len(found) == 1 and private.written_input(None) is None
