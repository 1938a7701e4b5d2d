"""Two processes under DistributedDataParallel: an overflow on one rank skips the step on both, compiled or not."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.checks.equality import assert_equal
from support.checks.exhaustive import exhaustive
from support.machines.ranks import asked_by, on_ranks
from support.oracles.scaled_runs import compile_scaled, make_scaler
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from fxamp.reports import registry

RANKS = 2
BAD_RANK, BAD_ITERATION, ITERATIONS = 1, 1, 4


def in_bfloat16(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """torch's hook, whose own name it accepts under NCCL only."""
    return bf16_compress_hook(state, bucket)


CASES = {
    "the wrapped model": ("aot_eager", True, {}),
    "the model inside": ("aot_eager", False, {}),
    "buckets as gradients": ("aot_eager", True, {"gradient_as_bucket_view": True}),
    "eager": ("eager", True, {}),
    "a static graph": ("aot_eager", False, {"static_graph": True}),
    "a static graph, wrapped": ("aot_eager", True, {"static_graph": True}),
    "unused parameters": ("aot_eager", False, {"find_unused_parameters": True}),
    "unused parameters, wrapped": ("aot_eager", True, {"find_unused_parameters": True}),
    "summed in bfloat16": ("aot_eager", False, {"hook": in_bfloat16}),
    "accumulated": ("aot_eager", False, {"parts": 2}),
    "accumulated, wrapped": ("aot_eager", True, {"parts": 2}),
    "several buckets": ("aot_eager", True, {"bucket_cap_mb": 5e-5}),
}


#: The wrapper inside and outside of the graph, and gradients that are reduced once for two backwards.
ALWAYS = ["the wrapped model", "the model inside", "accumulated"]


class Net(nn.Module):
    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.unused = nn.Linear(2, 2) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def train(rank: int, lowering: str, outside: bool, arguments: dict[str, Any]) -> dict[str, Any]:
    torch._dynamo.reset()
    arguments = dict(arguments)
    hook, parts = arguments.pop("hook", None), arguments.pop("parts", 1)
    net = Net(unused="find_unused_parameters" in arguments)
    scaler, before = make_scaler(2.0**10, growth_interval=2), registry.count()
    if outside:
        wrapped = DistributedDataParallel(net, **arguments)
        forward = compile_scaled(wrapped, scaler, lowering)
    else:
        forward = wrapped = DistributedDataParallel(compile_scaled(net, scaler, lowering), **arguments)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    skips, scales, gradients = [], [], []
    for iteration in range(ITERATIONS):
        optimizer.zero_grad()
        bad = (rank, iteration) == (BAD_RANK, BAD_ITERATION)
        # 1e36 is float32's, times the scale it is not: the overflow happens inside the backward of one rank.
        x = torch.full((4, 3), 1.0 + rank)
        for at, part in enumerate(x.chunk(parts)):
            with wrapped.no_sync() if at < parts - 1 else nullcontext():
                scaler.scale(forward(part).sum() * (1e36 if bad else 1.0)).backward()
        gradients.append(net.first.weight.grad.clone())
        skips.append(scaler.step(optimizer, return_skipped=True).skipped)
        scaler.update()
        scales.append(scaler.loss_scale)
    weights, graphs = [p.detach() for p in net.parameters()], registry.count() - before
    return {"skips": skips, "scales": scales, "weights": weights, "first": gradients[0], "graphs": graphs}


MODES = ("step", "unscale", "fused", "alone")


def train_uncompiled(rank: int, mode: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=mode == "fused")
    own = make_scaler(2.0**10, growth_interval=2, ranks=None if mode == "alone" else "world")
    skips, scales = [], []
    for iteration in range(ITERATIONS):
        optimizer.zero_grad()
        # Fixed, equal data: what is under test is who skips, and DDP averages what the ranks feed it.
        own.scale(model(torch.ones(4, 3)).square().mean()).backward()
        if (rank, iteration) == (BAD_RANK, BAD_ITERATION):
            # After DDP has reduced: only this rank sees it, as in a hook, or with sharded gradients.
            model.module.weight.grad[0, 0] = float("inf")
        if mode == "unscale":
            own.unscale_(optimizer)
        skips.append(own.step(optimizer, return_skipped=True).skipped)
        own.update()
        scales.append(own.loss_scale)
    return {"skips": skips, "scales": scales, "weights": [p.detach() for p in model.parameters()]}


def train_summing_by_hand(rank: int) -> dict[str, Any]:
    """The loop sums the gradients itself, which autograd does not count as a write; each rank decides alone."""
    torch._dynamo.reset()
    net, scaler = Net(), make_scaler(2.0**10, ranks=None, graph_norm=True)
    forward, optimizer = compile_scaled(net, scaler, "aot_eager"), torch.optim.SGD(net.parameters(), lr=0.1)
    skips, norms = [], []
    for iteration in range(2):
        optimizer.zero_grad()
        bad = (rank, iteration) == (BAD_RANK, BAD_ITERATION)
        scaler.scale(forward(torch.full((4, 3), 1.0 + rank)).sum() * (1e36 if bad else 1.0)).backward()
        gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
        for gradient in gradients:
            dist.all_reduce(gradient)
        if iteration != BAD_ITERATION:
            norms = [nn.utils.get_total_norm(gradients), scaler.clip_grad_norm_(optimizer, 1e-2)]
        skips.append(scaler.step(optimizer, return_skipped=True).skipped)
        scaler.update()
    return {"skips": skips, "norms": norms, "weights": [p.detach() for p in net.parameters()]}


def step_without_gradients(rank: int) -> str:
    """One rank without gradients takes part, and then refuses as it would alone."""
    parameter, own = torch.ones(2, requires_grad=True), make_scaler()
    loss = own.scale(parameter.sum())
    if rank == 0:
        loss.backward()
    try:
        own.step(torch.optim.SGD([parameter], lr=0.1))
    except AssertionError as error:
        return str(error)
    return "stepped"


def work(mesh: DeviceMesh, cases: Sequence[str]) -> dict[str, Any]:
    rank = mesh.get_local_rank()
    # Otherwise the first bucket holds the whole model, and torch.compile never splits the graph between buckets.
    dist._DEFAULT_FIRST_BUCKET_BYTES = 32
    results: dict[str, Any] = {name: train(rank, *CASES[name]) for name in cases}
    results |= {mode: train_uncompiled(rank, mode) for mode in MODES}
    return results | {"by hand": train_summing_by_hand(rank), "without gradients": step_without_gradients(rank)}


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """On each rank, what the selected tests ask for."""
    cases = {parameters["case"] for parameters in asked_by(request) if parameters.get("case") in CASES}
    return on_ranks(partial(work, cases=sorted(cases)), RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", [*exhaustive(CASES, ALWAYS), "step", "unscale", "fused"])
def test_both_ranks_skip_and_stay_equal(ranks: list[dict[str, Any]], case: str) -> None:
    first, second = (results[case] for results in ranks)
    assert first["skips"] == second["skips"] == [i == BAD_ITERATION for i in range(ITERATIONS)]
    assert first["scales"] == second["scales"] == [1024.0, 512.0, 512.0, 1024.0]
    assert case != "several buckets" or first["graphs"] > 1
    for one, other in zip(first["weights"], second["weights"], strict=True):
        assert torch.equal(one, other) and one.isfinite().all()


@pytest.mark.parametrize("case", exhaustive(CASES, ALWAYS))
def test_gradients_are_the_mean_of_true_ones(ranks: list[dict[str, Any]], case: str) -> None:
    reference = []
    for rank in range(RANKS):
        net = Net()
        net(torch.full((4, 3), 1.0 + rank)).sum().backward()
        reference.append(net.first.weight.grad)
    # Four products of float16's precision between the loss and this weight, then three roundings of the sum.
    bound = 4 * torch.finfo(torch.float16).eps
    bound += 3 * torch.finfo(torch.bfloat16).eps if "bfloat16" in case else 0
    torch.testing.assert_close(ranks[0][case]["first"], (reference[0] + reference[1]) / RANKS, rtol=bound, atol=bound)


def test_ranks_that_decide_alone_part(ranks: list[dict[str, Any]]) -> None:
    first, second = (results["alone"] for results in ranks)
    assert first["skips"] == [False] * ITERATIONS
    assert any(second["skips"])
    assert not torch.equal(first["weights"][0], second["weights"][0])


def test_gradients_that_a_loop_sums_by_hand_are_read(ranks: list[dict[str, Any]]) -> None:
    first, second = (results["by hand"] for results in ranks)
    for results in (first, second):
        expected, norm = results["norms"]
        torch.testing.assert_close(norm, expected)
        assert results["skips"] == [False, True]
    assert_equal(first["weights"], second["weights"])


def test_a_rank_without_gradients_takes_part(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["without gradients"] == "stepped"
    assert ranks[1]["without gradients"] == "No inf checks were recorded for this optimizer."
