"""The memory of one training step: its peak, and the part held between forward and backward."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils import _pytree as pytree

from fxamp.tools.bench.train.training import Training

_FORWARD_ENDED = "fxamp-bench: the forward ended"


@dataclass(frozen=True)
class Memory:
    """Bytes of tensors. ``peak`` includes parameters, optimizer state and batches; ``activations`` is what the forward
    keeps for the backward, including the loss. ``how`` names the source of the numbers."""

    peak: int
    activations: int
    how: str


def measure_memory(training: Training) -> Memory:
    """Run one step and measure its memory: on cuda from the allocator, on a CPU from torch.profiler's memory events."""
    return _on_cuda(training) if training.experiment.device == "cuda" else _on_cpu(training)


def _on_cuda(training: Training) -> Memory:
    training.wait()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = training.forward()
    held = torch.cuda.memory_allocated() - before
    _finish(training, loss)
    training.wait()
    return Memory(torch.cuda.max_memory_allocated(), held, "torch.cuda's allocator")


def _on_cpu(training: Training) -> Memory:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        loss = training.forward()
        with record_function(_FORWARD_ENDED):
            pass
        _finish(training, loss)
    events = recorded.profiler.kineto_results.events()
    ended = min(event.start_ns() for event in events if event.name() == _FORWARD_ENDED)
    changes = sorted(
        ((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"), key=lambda pair: pair[0]
    )
    total = peak = held = 0
    for time, change in changes:
        total += change
        peak = max(peak, total)
        held = total if time < ended else held
    return Memory(_lasting(training) + peak, held, "the CPU allocator's events in torch.profiler")


def _finish(training: Training, loss: Tensor) -> None:
    training.backward(loss)
    training.update()
    training.clear()


def _lasting(training: Training) -> int:
    """Return the bytes that live from step to step, which no event of one step shows; each storage counts once."""
    state = [*training.module.parameters(), *training.module.buffers(), training.batches]
    leaves = pytree.tree_leaves([state, [dict(values) for values in training.optimizer.state.values()]])
    storages = {leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes() for leaf in leaves if _is(leaf)}
    return sum(storages.values())


def _is(leaf: object) -> bool:
    return isinstance(leaf, Tensor)
