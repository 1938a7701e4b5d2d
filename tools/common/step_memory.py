"""The memory of one training step: on cuda from the allocator, on a CPU from torch.profiler's memory events."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils import _pytree as pytree

from fxamp.optim.precision.state_precision import parts_of
from fxamp.optim.shards import local

_FORWARD_ENDED = "fxamp: the forward ended"


@dataclass(frozen=True)
class StepMemory:
    """Bytes of tensors in one step.

    ``lasting``: what lives from step to step: parameters, buffers, optimizer state, batches. ``step``: the peak
    that the step needs in addition, gradients included. ``kept``: what the forward keeps for the backward, the loss
    included. ``how`` names the source of the numbers.
    """

    lasting: int
    step: int
    kept: int
    how: str

    @property
    def peak(self) -> int:
        """The most at once of all."""
        return self.lasting + self.step


def step_memory(
    device: str, forward: Callable[[], Tensor], finish: Callable[[Tensor], object], lasting: Callable[[], int]
) -> StepMemory:
    """Run one step and measure its memory.

    ``forward`` returns the loss, and ``finish`` makes the rest of the step; gradients are None before and after.
    ``lasting`` returns the bytes that live from step to step, which no event of one step on a CPU shows. What a library
    allocates past torch's allocator, such as oneDNN's scratch, is not seen.
    """
    return _on_cuda(forward, finish) if device == "cuda" else _on_cpu(forward, finish, lasting)


def _on_cuda(forward: Callable[[], Tensor], finish: Callable[[Tensor], object]) -> StepMemory:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = forward()
    kept = torch.cuda.memory_allocated() - before
    finish(loss)
    torch.cuda.synchronize()
    return StepMemory(before, torch.cuda.max_memory_allocated() - before, kept, "torch.cuda's allocator")


def _on_cpu(
    forward: Callable[[], Tensor], finish: Callable[[Tensor], object], lasting: Callable[[], int]
) -> StepMemory:
    level = {"KINETO_LOG_LEVEL": os.environ.get("KINETO_LOG_LEVEL", "99")}  # else it prints that it starts and stops
    with (
        patch.dict(os.environ, level),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded,
    ):
        loss = forward()
        with record_function(_FORWARD_ENDED):
            pass
        finish(loss)
    events = recorded.profiler.kineto_results.events()
    ended = min(event.start_ns() for event in events if event.name() == _FORWARD_ENDED)
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    total = peak = kept = 0
    for time, change in changes:
        total += change
        peak = max(peak, total)
        kept = total if time < ended else kept
    return StepMemory(lasting(), peak, kept, "the CPU allocator's events in torch.profiler")


def lasting_bytes(module: nn.Module, optimizer: torch.optim.Optimizer, batches: object) -> int:
    """Return this rank's bytes of parameters, buffers, optimizer state and ``batches``; each storage counts once."""
    state = [*module.parameters(), *module.buffers(), batches]
    leaves = pytree.tree_leaves([state, [dict(values) for values in optimizer.state.values()]])
    tensors = [local(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
    storages = (part.untyped_storage() for part in parts_of(tensors))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
