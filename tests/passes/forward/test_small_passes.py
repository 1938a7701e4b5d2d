"""fit-constants, restore-outputs, fold-casts and drop-regions."""

from collections.abc import Sequence

import torch
from support.checks.bench_graph import Workbench, policy, workbench

from fxamp.passes.forward.annotate_rules import AnnotateRules
from fxamp.passes.forward.drop_regions import DropRegions
from fxamp.passes.forward.fit_constants import FitConstants
from fxamp.passes.forward.fold_casts import FoldCasts
from fxamp.passes.forward.insert_casts import InsertCasts
from fxamp.passes.forward.restore_outputs import RestoreOutputs
from fxamp.passes.shared.cast_writer import CastWriter

CAST = (AnnotateRules(), InsertCasts())
LOWEST = torch.finfo(torch.float32).min


def test_a_constant_for_float32_is_brought_into_range() -> None:
    bench = workbench(lambda a: a.mm(a).masked_fill(a > 0, LOWEST), torch.ones(2, 2))
    bench.run(*CAST)
    assert bench.golden("fit-constants", FitConstants()).modified == 1
    (value,) = bench.captured.module(torch.ones(2, 2))
    assert torch.equal(value, torch.full((2, 2), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16))


def test_a_constant_tensor_is_brought_into_range() -> None:
    bench = workbench(lambda a: a.mm(a).masked_fill(a > 0, torch.tensor(LOWEST)), torch.ones(2, 2))
    bench.run(*CAST)
    assert bench.run(FitConstants()).modified == 1
    assert bench.run(FitConstants()).modified == 0
    (value,) = bench.captured.module(torch.ones(2, 2))
    assert torch.isfinite(value).all()


def test_constants_that_fit_and_infinities_stay() -> None:
    bench = workbench(lambda a: a.mm(a).masked_fill(a > 0, -torch.inf).clamp(-3.0, 3.0), torch.ones(2, 2))
    bench.run(*CAST)
    bench.assert_unchanged_by(FitConstants())


def test_outputs_are_restored_to_their_captured_dtypes() -> None:
    bench = workbench(lambda a: (a.mm(a), a + 1), torch.ones(2, 2))
    bench.run(*CAST)
    assert bench.golden("restore-outputs", RestoreOutputs()).modified == 1


def test_several_results_of_one_op_are_cast_each_for_itself() -> None:
    def program(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        largest = a.mm(a).max(-1)
        return largest.values, largest.indices, largest.values[:1]

    bench = workbench(program, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    bench.run(*CAST)
    assert bench.run(RestoreOutputs()).modified == 2
    values, _, view = bench.captured.module(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert values.dtype is torch.float32 and values.tolist() == [10.0, 22.0]
    values.zero_()
    assert view.dtype is torch.float32 and not view.any()


def test_outputs_that_share_memory_still_do() -> None:
    def program(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product = a.mm(a)
        first, second = product.split(1)
        second.mul_(3)
        return product, first[0], second.view(2), a + 1

    bench = workbench(program, torch.ones(2, 2))
    bench.run(*CAST)
    assert bench.golden("restore-outputs-views", RestoreOutputs()).modified == 3
    whole, first, second, _ = bench.captured.module(torch.ones(2, 2))
    assert torch.equal(whole, torch.tensor([[2.0, 2.0], [6.0, 6.0]]))
    first.zero_()
    second.zero_()
    assert whole.dtype is torch.float32 and not whole.any()


def test_views_of_several_inputs_share_the_memory_of_each() -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows, columns = a.mm(a)[:, :1], b.mm(b)[:1]
        grids = torch.meshgrid(rows.flatten(), columns.flatten(), indexing="ij")
        return (*torch.broadcast_tensors(rows, columns, a), *grids, *torch.atleast_3d(rows[0], columns), rows, columns)

    operands = torch.ones(2, 2), torch.full((2, 2), 3.0)
    bench = workbench(program, *operands)
    bench.run(*CAST)
    assert bench.run(RestoreOutputs()).modified == 8
    for ours, expected in zip(bench.captured.module(*operands), program(*operands), strict=True):
        assert ours.dtype is torch.float32 and torch.equal(ours, expected) and ours.stride() == expected.stride()
    assert _owners(bench.captured.module(*operands)) == _owners(program(*operands)) == [0, 1, 2, 0, 1, 0, 1, 0, 1]


def test_a_result_read_as_data_shares_the_memory_of_others() -> None:
    def program(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product = a.mm(a)
        return product.detach(), product.data, product.data.t(), product

    compiled = torch.compile(program, backend="fxamp", options={"policy": policy(), "lowering": "eager"})
    a = torch.ones(2, 2, requires_grad=True)
    ours = compiled(a)
    assert _owners(ours) == [0, 0, 0, 0]
    assert [result.requires_grad for result in ours] == [False, False, False, True]


def _owners(results: Sequence[torch.Tensor]) -> list[int]:
    """By result, the first result that shares its memory."""
    memory = [result.untyped_storage().data_ptr() for result in results]
    return [memory.index(pointer) for pointer in memory]


def test_outputs_may_be_kept() -> None:
    bench = workbench(lambda a: a.mm(a), torch.ones(2, 2), under=policy(outputs="keep"))
    bench.run(*CAST)
    assert bench.run(RestoreOutputs()).modified == 0


def _with_pair(second: torch.dtype, extra_user: bool = False) -> Workbench:
    """A graph whose output goes through two inserted casts: to float32, or bfloat16, and back."""
    first = torch.float32 if second is torch.bfloat16 else torch.bfloat16
    bench = workbench(lambda a: a.relu(), torch.ones(2, 2, dtype=second))
    graph = bench.captured.module.graph
    (relu,) = [node for node in graph.nodes if node.op == "call_function"]
    output = next(iter(reversed(graph.nodes)))
    writer = CastWriter(graph, grad=False)
    wide = writer.cast(relu, first, output, "a test")
    narrow = writer.cast(wide, second, output, "a test")
    output.args = ((narrow, wide) if extra_user else (narrow,),)
    bench.captured.module.recompile()
    return bench


def test_a_pair_that_loses_nothing_cancels() -> None:
    bench = _with_pair(torch.bfloat16)
    assert bench.golden("fold-casts", FoldCasts()).modified == 1


def test_a_pair_that_rounds_stays() -> None:
    assert _with_pair(torch.float32).run(FoldCasts()).modified == 0


def test_a_pair_whose_middle_is_needed_stays() -> None:
    assert _with_pair(torch.bfloat16, extra_user=True).run(FoldCasts()).modified == 0


def test_a_cast_that_the_user_wrote_stays() -> None:
    bench = workbench(lambda a: a.float().bfloat16(), torch.ones(2, 2, dtype=torch.bfloat16))
    assert bench.run(FoldCasts()).modified == 0


def test_region_marks_are_dropped_for_this_device_only() -> None:
    def program(a: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return a + 1

    bench = workbench(program, torch.ones(2))
    assert bench.golden("drop-regions", DropRegions()).modified == 1


def test_marks_of_another_device_stay() -> None:
    def program(a: torch.Tensor) -> torch.Tensor:
        with torch.autocast("xpu", torch.bfloat16, enabled=False):
            return a + 1

    bench = workbench(program, torch.ones(2))
    assert bench.run(DropRegions()).modified == 0
    assert "_enter_autocast" in bench.text
