"""DTensors in compiled graphs, on a mesh of one rank: Inductor, changing batch sizes, and reports."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_programs import PROGRAMS, WIDTH
from parallel_runs import by_autocast, by_fxamp
from support.checks.equality import assert_equal
from support.checks.exhaustive import exhaustive
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import fxamp
from fxamp.graph import inner_tensors
from fxamp.graph_text.parse import parse_text
from fxamp.reports import registry


@pytest.fixture
def mesh(one_rank: None) -> DeviceMesh:
    return init_device_mesh("cpu", (1,))


@pytest.fixture
def first_of_two() -> Iterator[DeviceMesh]:
    """The first of two ranks; the other one does not exist, and what it would send is not looked at."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.exhaustive
@pytest.mark.inductor
@pytest.mark.parametrize("scaled", [False, True])
def test_inductor(mesh: DeviceMesh, scaled: bool) -> None:
    reference, got = (
        by_autocast(PROGRAMS["sequence"], mesh, scaled),
        by_fxamp(PROGRAMS["sequence"], mesh, "inductor", scaled),
    )
    # Inductor rounds less often than eager code: two roundings of each of three ops in 16 bits may be missing.
    eps = torch.finfo(torch.float16 if scaled else torch.bfloat16).eps
    for name, value in reference.items():
        assert value is not None and got[name] is not None
        (part, placements), (expected, expected_placements) = got[name], value
        assert placements == expected_placements
        assert (part - expected).norm() <= 6 * eps * expected.norm(), name


@pytest.mark.parametrize("lowering", exhaustive(["eager", "aot_eager"], always=["aot_eager"]))
def test_sizes_that_change_become_symbols(mesh: DeviceMesh, lowering: str) -> None:
    program, before = PROGRAMS["mlp"], registry.count()
    net, twin = program.make(mesh), program.make(mesh)
    net.compile(backend="fxamp", fullgraph=True, options={"policy": "cpu-bfloat16", "lowering": lowering})
    for batch in (2, 3, 5, 6):
        x = torch.randn(batch, 4, WIDTH, generator=torch.Generator().manual_seed(batch))
        got = net(x)
        with torch.autocast("cpu", torch.bfloat16):
            expected = twin(x).float()
        got.square().sum().backward()
        expected.square().sum().backward()
        assert torch.equal(got, expected)
        for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            assert_equal(inner_tensors(ours.grad), inner_tensors(theirs.grad))
    assert registry.count() - before == 2


def test_a_rewritten_module_runs_on_dtensors(mesh: DeviceMesh) -> None:
    program = PROGRAMS["layouts"]
    net, inputs = program.make(mesh), program.inputs(0, 1)
    rewritten = fxamp.rewrite(net, inputs, policy="cpu-bfloat16")
    with torch.autocast("cpu", torch.bfloat16):
        expected = net(*inputs)
    assert_equal(rewritten(*inputs), expected)


def saved_bytes(net: torch.nn.Module, inputs: tuple[Tensor, ...], autocast: bool) -> int:
    """What autograd saves of a run on real DTensors, without the inputs, the parameters and casts of those."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        net(*inputs)
    there = {part.untyped_storage()._cdata for t in (*net.parameters(), *inputs) for part in inner_tensors(t)}
    sizes = {part.untyped_storage()._cdata: part.untyped_storage().nbytes() for t in saved for part in inner_tensors(t)}
    return sum(size for storage, size in sizes.items() if storage not in there)


def test_bytes_are_those_of_this_rank(first_of_two: DeviceMesh, tmp_path: Path) -> None:
    program = PROGRAMS["mlp"]
    net, inputs = program.make(first_of_two), program.inputs(0, 2)
    options: dict[str, Any] = {"policy": "cpu-bfloat16", "lowering": "eager", "dump": str(tmp_path)}
    net.compile(backend="fxamp", fullgraph=True, options=options)
    net(*inputs)
    (path,) = tmp_path.rglob("*_cast.py")
    (graph,) = parse_text(path.read_text(), str(path)).graphs
    types = {entry.name: str(entry.values[0]) for entry in graph.entries if entry.values}
    assert types["linear"] == "bf16[2, 4, 8]" and types["linear_1"] == "bf16[2, 4, 8]"
    weights = [value for name, value in types.items() if name.endswith("up_parameters_weight_")]
    assert weights == ["f32[8, 8]"], "half of the rows"
    assert graph.kept_before == saved_bytes(program.make(first_of_two), inputs, autocast=False)
    assert graph.kept_after == saved_bytes(program.make(first_of_two), inputs, autocast=True)
