"""Copies to host memory on a GPU: no value is read before it is there, nor overwritten while it is copied."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.machines.lacks import ON_GPU
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fxamp import Policy, Rule
from fxamp.kernels import host_memory

pytestmark = ON_GPU

OPS = torch.ops.fxamp
#: Cycles of a GPU's clock: tens of milliseconds, while a copy of the values below takes less than one.
LONG = 50_000_000
SIZE = 1 << 20


@pytest.fixture
def device() -> Iterator[torch.device]:
    yield torch.device("cuda", torch.cuda.current_device())
    torch.cuda.synchronize()


def test_a_copy_follows_the_work_that_makes_its_value(device: torch.device) -> None:
    value = torch.zeros(SIZE, device=device)
    torch.cuda._sleep(LONG)
    value.fill_(3)
    host = OPS.send_to_host(value, [])
    OPS.await_copies([host], device, [value])
    value.fill_(4)  # after the copy
    torch.cuda.synchronize()
    assert host.is_pinned() and bool((host == 3).all())


def test_what_waits_reads_the_copy(device: torch.device) -> None:
    """The op for the copy back is called while the copy out still waits for its value."""
    value = torch.zeros(SIZE, device=device)
    torch.cuda._sleep(LONG)
    value.fill_(3)
    host = OPS.send_to_host(value, [])
    back = OPS.take_from_host(host[None], device, [])
    OPS.await_copies([back], device, [host])
    result = back * 2
    torch.cuda.synchronize()
    assert bool((result == 6).all())


def test_a_later_copy_lets_later_work_wait_for_the_earlier_one(device: torch.device) -> None:
    copies = host_memory._stream(device)
    first, second = torch.full((SIZE,), 1.0, device=device), torch.full((SIZE,), 2.0, device=device)
    with torch.cuda.stream(copies):
        torch.cuda._sleep(LONG)
    host = OPS.send_to_host(first, [])
    other = OPS.send_to_host(second, [host, first])
    first.fill_(9)
    OPS.await_copies([other], device, [second])
    torch.cuda.synchronize()
    assert bool((host == 1).all()) and bool((other == 2).all())


def test_memory_that_the_program_frees_is_not_copied_over(device: torch.device) -> None:
    """A copy back ends before the memory of its source, or of another value, is used again."""
    hosts = [torch.full((SIZE,), float(n)).pin_memory() for n in range(8)]
    total = torch.zeros(SIZE, device=device)
    for host in hosts:
        back = OPS.take_from_host(host[None], device, [])
        OPS.await_copies([back], device, [host])
        total += back
        del back
    torch.cuda.synchronize()
    assert bool((total == sum(range(8))).all())


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(512, 1024) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(1024, 512) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.tanh(up(x)))
        return x.float().pow(2).mean()


class Training:
    """The compiled model, and its gradients for a few inputs; ``held``: bytes between the forward and the backward."""

    def __init__(self, away: bool, lowering: str) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        policy = Policy.load("cuda-bfloat16")
        if away:
            rule = Rule("away", keep="host", region="kept", ops=("*",))  # type: ignore[arg-type]
            policy = replace(policy, name="away", rules=(*policy.rules, rule))
        self.model = Blocks().cuda()
        self.compiled = torch.compile(self.model, backend="fxamp", options={"policy": policy, "lowering": lowering})
        generator = torch.Generator().manual_seed(1)
        self.inputs = [torch.randn(4096, 512, generator=generator).cuda() for _ in range(3)]
        self.held = 0

    def step(self, x: Tensor, retain: bool = False) -> list[Tensor]:
        gc.collect()
        before = torch.cuda.memory_allocated()
        loss = self.compiled(x)
        torch.cuda.synchronize()
        self.held = torch.cuda.memory_allocated() - before
        if retain:
            torch.autograd.grad(loss, list(self.model.parameters()), retain_graph=True)
        return list(torch.autograd.grad(loss, list(self.model.parameters())))


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.inductor
@pytest.mark.parametrize("lowering", ["aot_eager", "inductor"])
def test_training_has_the_same_gradients_and_holds_less(lowering: str) -> None:
    results: dict[bool, list[list[Tensor]]] = {}
    held = {}
    for away in (False, True):
        training = Training(away, lowering)
        results[away] = [training.step(x, retain=at == 1) for at, x in enumerate(training.inputs * 2)]
        held[away] = training.held
    assert all(equal(*pair) for pair in zip(results[False], results[True], strict=True))
    assert held[True] < 0.5 * held[False]


@pytest.mark.inductor
def test_forwards_before_backwards_on_another_stream_and_under_hooks() -> None:
    plain, away = Training(False, "inductor"), Training(True, "inductor")
    expected = [plain.step(x) for x in plain.inputs]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        losses = [away.compiled(x) for x in away.inputs]
        found = [list(torch.autograd.grad(loss, list(away.model.parameters()))) for loss in reversed(losses)]
    torch.cuda.synchronize()
    assert all(equal(*pair) for pair in zip(reversed(expected), found, strict=True))


def test_a_cuda_graph_that_captures_a_copy_is_refused(device: torch.device) -> None:
    value: Any = torch.ones(SIZE, device=device)
    OPS.send_to_host(value, [])
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=r"keep = 'host'.*CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        OPS.send_to_host(value, [])
