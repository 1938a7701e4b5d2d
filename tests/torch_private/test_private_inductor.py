"""Inductor's table of ops is as fxamp takes it to be."""

import inspect
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch._inductor.compile_fx
from torch import Tensor
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.dependencies import StarDep, WeakDep
from torch._inductor.scheduler import Scheduler, SchedulerNode
from torch._inductor.utils import fresh_cache
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from fxamp import torch_private as private

aten = torch.ops.aten


def test_whose_kernels_inductor_calls() -> None:
    called = (aten._scaled_dot_product_flash_attention_backward.default, aten._cdist_backward.default)
    assert all(map(private.calls_kernel, called))
    written = (aten.add.Tensor, aten.mm.default, aten.view.default, torch.add)
    assert not any(map(private.calls_kernel, written))


def test_a_function_in_cpp_gets_addresses_and_numbers() -> None:
    source = """
    #include <cstdint>
    extern "C" void kernel(const float* from, double* to, const int64_t count) {
        for (int64_t at = 0; at < count; ++at) to[at] = 2 * from[at];
    }
    """
    double = private.compiled_function(["const float*", "double*", "const int64_t"], source)
    result = torch.zeros(3, dtype=torch.float64)
    double(torch.tensor([1.0, 2.0, 3.0]), result, 2)
    assert result.tolist() == [2.0, 4.0, 0.0]


def test_outputs_that_became_none_have_no_layout() -> None:
    graph = torch.fx.Graph()
    output = graph.output((None, graph.placeholder("x")))
    private.drop_outputs(output, [0])
    assert not output.meta
    output.meta["user_visible_output_idxs"] = [0, 1]
    private.drop_outputs(output, {0: None})
    assert output.meta["user_visible_output_idxs"] == [1]
    lowering = inspect.getsource(torch._inductor.compile_fx)
    assert '"user_visible_output_idxs"' in lowering


def test_a_node_that_is_computed_again_keeps_its_place_and_the_names_of_what_was_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed = []
    monkeypatch.setattr(SchedulerNode, "recompute_size_and_body", lambda node, *args, **kwargs: computed.append(args))
    private.order_writes()
    mended = SchedulerNode.recompute_size_and_body
    private.order_writes()
    assert SchedulerNode.recompute_size_and_body is mended, "once"
    before = WeakDep("input", "write"), StarDep("scatter")
    node = Mock(mutation_renames={"before": "after"})
    node.read_writes.reads = OrderedSet([*before, Mock()])
    mended(node, None)
    assert computed == [(None,)]
    node.read_writes.with_read.assert_called_once_with(OrderedSet(before))
    renamed = node.read_writes.with_read.return_value.rename
    renamed.assert_called_once_with({"before": "after"})
    node.set_read_writes.assert_called_once_with(renamed.return_value)


def test_an_input_is_written_to_after_it_is_read_in_another_order_of_memory() -> None:
    """Two kernels read the input, by their loops in the order of its memory and of the other input's."""

    def step(gradient: Tensor, parameter: Tensor, mean: Tensor, skip: Tensor) -> None:
        changed = gradient + 0.1 * parameter
        new = mean * 0.9 + changed
        parameter.copy_(torch.where(skip, parameter, parameter - new))
        gradient.copy_(torch.where(skip, gradient, changed))
        mean.copy_(torch.where(skip, mean, new))

    def inputs() -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        gradient, parameter, mean = (torch.randn(2, 3, 2, 2, generator=generator) for _ in range(3))
        last = torch.channels_last
        return [gradient, parameter.to(memory_format=last), mean.to(memory_format=last), torch.tensor(False)]

    private.order_writes()
    compiled, own = inputs(), inputs()
    torch.compile(step)(*compiled)
    step(*own)
    torch.testing.assert_close(compiled, own)


def test_inductor_reads_whose_inputs_are_realized_where_it_lowers() -> None:
    from torch._inductor import graph, lowering

    op = torch.ops.aten.cummax.default
    assert graph.needs_realized_inputs is lowering.needs_realized_inputs and op not in graph.needs_realized_inputs
    private.realize_inputs_of(op)
    try:
        assert op in graph.needs_realized_inputs
    finally:
        lowering.needs_realized_inputs.discard(op)


@pytest.mark.inductor
def test_which_buffers_the_generated_code_overwrites(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decisions that are made before code generation are those that it makes."""
    decided, written = dict[str, str](), dict[str, str]()
    generate, overwrite = Scheduler.codegen, PythonWrapperCodegen.codegen_inplace_reuse

    def deciding(scheduler: Scheduler) -> None:
        decided.update(private.overwritten_buffers(V.graph))
        generate(scheduler)

    def overwriting(wrapper: PythonWrapperCodegen, old: Any, new: Any) -> None:
        written[new.get_name()] = old.get_name()
        overwrite(wrapper, old, new)

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        product = x @ x
        again = (product.exp() @ x).sin()
        return again, (again @ x).exp() @ x

    monkeypatch.setattr(Scheduler, "codegen", deciding)
    monkeypatch.setattr(PythonWrapperCodegen, "codegen_inplace_reuse", overwriting)
    x = torch.rand(4, 4)
    with fresh_cache():
        torch.testing.assert_close(torch.compile(program)(x), program(x))
    assert decided == written and len(written) == 3
