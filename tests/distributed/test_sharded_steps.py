"""Compiled optimizer steps on DTensors: each rank steps its shard, as one process steps the whole."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.checks.equality import assert_equal
from support.checks.exhaustive import exhaustive
from support.machines.ranks import on_ranks, whole
from support.programs.every_optimizer import OPTIMIZERS
from support.programs.user_optimizers import Counting
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import fxamp
from fxamp.kernels import Implementation, forced
from fxamp.optim import CompiledOptimizer
from fxamp.optim.packed_tensor import PackedTensor
from fxamp.optim.shards import local
from fxamp.tools.bench.host_syncs import HostReads

RANKS = (2, 4)
BAD_RANK, BAD_STEP, STEPS = 1, 2, 4
SHAPES = ((4, 3), (3,), (1,), (5, 2), (4, 256))
"""Of the vector of three one rank has two elements; of the single element one rank has none."""
PLACEMENTS: tuple[Placement, ...] = (Shard(0), Shard(0), Shard(0), Replicate(), Shard(0))
EVERY = (0, 1, 2, 3)
IN_BLOCKS = (2, 3, 4)
"""Their blocks of 256 elements are the same on each rank and in one process."""
MAX_NORM = 2.0
ELEMENTWISE = {name: OPTIMIZERS[name] for name in ("AdamW", "SGD", "RMSprop", "Adagrad")} | {"a user's own": Counting}
WHOLE_TENSORS = ("Muon",)

Result = dict[str, Any]
"""``weights``, ``state``, ``refusals``, and the collective calls and host reads of the last step."""
Make = Callable[[list[Tensor]], torch.optim.Optimizer]


def values(seed: int, at: int) -> Tensor:
    """Eighths of whole numbers: sums of their squares are exact in any order."""
    generator = torch.Generator().manual_seed(100 * seed + at)
    return torch.randint(-8, 9, SHAPES[at], generator=generator) / 8


def spread(value: Tensor, at: int, mesh: DeviceMesh | None) -> Tensor:
    return value if mesh is None else distribute_tensor(value, mesh, [PLACEMENTS[at]])


def parameters(mesh: DeviceMesh | None, only: tuple[int, ...]) -> dict[int, nn.Parameter]:
    return {at: nn.Parameter(spread(values(0, at), at, mesh)) for at in only}


def state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    saved = optimizer.state_dict()["state"].values()
    return [whole(torch.as_tensor(value)) for entry in saved for value in entry.values()]


@contextmanager
def collectives() -> Iterator[list[str]]:
    """The all-reduces that are made meanwhile."""
    calls: list[str] = []
    real = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append("all_reduce")
        return real(*args, **kwargs)

    dist.all_reduce = counted
    try:
        yield calls
    finally:
        dist.all_reduce = real


def stepped(mesh: DeviceMesh | None, make: Make, clip_norm: float | None, **how: Any) -> Result:
    """Some steps of a compiled optimizer, or of an eager one: ``how`` is empty."""
    own = parameters(mesh, how.pop("only", EVERY))
    optimizer = make([*own.values()])
    if how:
        fxamp.compile_optimizer(optimizer, clip_norm=clip_norm, **how)
    with collectives() as calls, HostReads() as reads:
        for step in range(1, STEPS + 1):
            for at, parameter in own.items():
                parameter.grad = spread(values(step, at), at, mesh)
            if not how and clip_norm is not None:
                nn.utils.clip_grad_norm_([*own.values()], clip_norm)
            calls.clear()
            reads.count = 0
            optimizer.step()
        counts = {"collectives": len(calls), "reads": reads.count}
    refusals = CompiledOptimizer.of(optimizer).reasons if how else ()
    weights = [whole(parameter) for parameter in own.values()]
    return {"weights": weights, "state": state(optimizer), "refusals": refusals, **counts}


def by_kernel(mesh: DeviceMesh | None) -> Result:
    with forced(Implementation.INTERPRETER):
        return stepped(mesh, OPTIMIZERS["AdamW"], MAX_NORM, lowering="inductor")


def scaled(mesh: DeviceMesh | None, skip: str, dtype: torch.dtype = torch.float32) -> Result:
    """A scaler with clipping, and an overflow on one rank."""
    first = parameters(mesh, EVERY)
    own = {at: nn.Parameter(results.detach().to(dtype)) for at, results in first.items()}
    optimizer = torch.optim.AdamW([*own.values()], lr=0.1, foreach=False)
    scaler = fxamp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2, skip=skip, step_lowering="aot_eager")
    norms, skips = [], []
    with collectives() as calls:
        for step in range(1, STEPS + 1):
            factor = float(scaler.scale(torch.ones(())))
            for at, parameter in own.items():
                gradient = spread(values(step, at).to(dtype) * factor, at, mesh)
                bad = step == BAD_STEP and at == 0 and (mesh is None or mesh.get_local_rank() == BAD_RANK)
                if bad:
                    (gradient.to_local() if mesh is not None else gradient)[-1] = math.inf
                parameter.grad = gradient
            calls.clear()
            norms.append(whole(scaler.clip_grad_norm_(optimizer, MAX_NORM)).item())
            skips.append(bool(scaler.step(optimizer, return_skipped=True).skipped))
            scaler.update()
    weights = [whole(parameter) for parameter in own.values()]
    return {"weights": weights, "norms": norms, "skips": skips, "scale": scaler.loss_scale, "collectives": len(calls)}


def partial(mesh: DeviceMesh) -> Result:
    """A gradient of which every rank has a part of the sum, as that of a norm under sequence parallelism."""
    results = []
    for compiled in (True, False):
        parameter = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
        optimizer = torch.optim.AdamW([parameter], lr=0.1, foreach=False)
        if compiled:
            fxamp.compile_optimizer(optimizer, clip_norm=MAX_NORM, lowering="aot_eager")
        for step in range(1, STEPS):
            part = torch.arange(4.0) * step * (mesh.get_local_rank() + 1)
            parameter.grad = DTensor.from_local(part, mesh, [Partial()], run_check=False)
            if not compiled:
                parameter.grad = parameter.grad.redistribute(placements=[Replicate()])
                nn.utils.clip_grad_norm_([parameter], MAX_NORM)
            optimizer.step()
        results.append(whole(parameter))
    return {"ours": results[0], "theirs": results[1]}


#: The table of a policy, the parameters' dtype, which parameters are stepped, and by what.
FEWER_BITS = {
    "bfloat16": ('state = "bfloat16"', torch.float32, EVERY, "aot_eager"),
    "8bit, by the kernel": ('state = "8bit"', torch.float32, IN_BLOCKS, "inductor"),
    "kahan": ('state = "float8_e4m3fn"\nweights = "kahan"', torch.bfloat16, IN_BLOCKS, "aot_eager"),
}


def in_fewer_bits(mesh: DeviceMesh | None, name: str) -> Result:
    """Steps with packed state; half of them by an optimizer that has loaded what another one saved."""
    table, dtype, only, lowering = FEWER_BITS[name]
    policy = fxamp.Policy.loads(f'extends = ["cpu-bfloat16"]\n[optimizer]\n{table}\n')
    own = {at: nn.Parameter(results.detach().to(dtype)) for at, results in parameters(mesh, only).items()}
    saved: dict[str, Any] | None = None
    forms = set()
    for first in (1, 3):
        optimizer = torch.optim.AdamW([*own.values()], lr=0.1)
        fxamp.compile_optimizer(optimizer, policy, lowering=lowering)
        if saved is not None:
            optimizer.load_state_dict(saved)
        for step in (first, first + 1):
            for at, parameter in own.items():
                parameter.grad = spread(values(step, at).to(dtype), at, mesh)
            with forced(Implementation.INTERPRETER):
                optimizer.step()
        held = [local(value) for entry in optimizer.state.values() for value in entry.values()]
        forms |= {value.form for value in held if isinstance(value, PackedTensor)}
        saved = copy.deepcopy(optimizer.state_dict())
    assert saved is not None
    kinds = {type(value) for entry in saved["state"].values() for value in entry.values() if value.dim()}
    weights = [whole(parameter) for parameter in own.values()]
    return {"weights": weights, "state": state(optimizer), "kept": sorted(forms), "kinds": sorted(map(str, kinds))}


def work(mesh: DeviceMesh) -> dict[str, Any]:
    results: dict[str, Any] = {
        name: stepped(mesh, make, MAX_NORM, lowering="aot_eager") for name, make in ELEMENTWISE.items()
    }
    for name in WHOLE_TENSORS:
        ours = stepped(mesh, OPTIMIZERS[name], None, lowering="aot_eager", only=(0,))
        results[name] = ours, stepped(mesh, OPTIMIZERS[name], None, only=(0,))
    results |= {skip: scaled(mesh, skip) for skip in ("device", "host")}
    packed = {f"packed {name}": in_fewer_bits(mesh, name) for name in FEWER_BITS}
    return results | {"kernel": by_kernel(mesh), "partial": partial(mesh)} | packed


@pytest.fixture(scope="module", params=exhaustive(RANKS, always=[2]), ids=lambda ranks: f"{ranks} ranks")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(work, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_shards_step_as_the_whole_does(ranks: list[dict[str, Any]], name: str) -> None:
    alone = stepped(None, ELEMENTWISE[name], MAX_NORM, lowering="aot_eager")
    for results in ranks:
        assert results[name]["refusals"] == ()
        assert_equal(results[name]["weights"], alone["weights"])
        assert_equal(results[name]["state"], alone["state"])


def test_the_generated_kernel_steps_shards_and_counts_where_there_is_no_element(ranks: list[dict[str, Any]]) -> None:
    alone = by_kernel(None)
    for results in ranks:
        assert results["kernel"]["refusals"] == ()
        assert_equal(results["kernel"]["weights"], alone["weights"])
        assert_equal(results["kernel"]["state"], alone["state"])


def test_a_step_waits_only_for_one_sum_of_squares(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        assert (results["AdamW"]["collectives"], results["AdamW"]["reads"]) == (1, 0)
        assert results["device"]["collectives"] == 2, "the norm's, and the flags'"


@pytest.mark.parametrize("name", WHOLE_TENSORS)
def test_a_step_that_is_not_elementwise_stays_eager_with_a_warning(ranks: list[dict[str, Any]], name: str) -> None:
    for results in ranks:
        ours, theirs = results[name]
        assert len(ours["refusals"]) == 1
        assert_equal(ours["weights"], theirs["weights"])


def test_an_overflow_on_one_rank_is_skipped_by_all(ranks: list[dict[str, Any]]) -> None:
    exact, alone = (scaled(None, "host", dtype) for dtype in (torch.float64, torch.float32))
    for results in ranks:
        ours = results["device"]
        assert ours["skips"] == results["host"]["skips"] == [step == BAD_STEP for step in range(1, STEPS + 1)]
        assert ours["scale"] == results["host"]["scale"] == alone["scale"]
        for norm, true in zip(ours["norms"], exact["norms"], strict=True):
            assert norm == true or abs(norm - true) <= torch.finfo(torch.float32).eps * true
        assert_equal(ours["weights"], ranks[0]["device"]["weights"])
        for a, b, c in zip(ours["weights"], alone["weights"], exact["weights"], strict=True):
            bound = 4 * (b.double() - c).abs().max() + torch.finfo(torch.float32).eps * (1 + c.abs().max())
            assert (a.double() - c).abs().max() <= bound


def test_a_gradient_that_is_a_partial_sum_is_summed_first(ranks: list[dict[str, Any]]) -> None:
    eps = torch.finfo(torch.float32).eps
    for results in ranks:
        ours, theirs = results["partial"]["ours"], results["partial"]["theirs"]
        # Three steps of six roundings, of numbers of about one.
        assert (ours - theirs).abs().max() <= 18 * eps


@pytest.mark.parametrize("name", FEWER_BITS)
def test_each_rank_keeps_its_shard_in_fewer_bits_and_saves_dtensors(ranks: list[dict[str, Any]], name: str) -> None:
    alone = in_fewer_bits(None, name)
    assert alone["kinds"] == [str(Tensor)]
    for results in ranks:
        ours = results[f"packed {name}"]
        assert ours["kept"] == alone["kept"] and alone["kept"] and ours["kinds"] == [str(DTensor)]
        assert_equal(ours["weights"], alone["weights"])
        assert_equal(ours["state"], alone["state"])
