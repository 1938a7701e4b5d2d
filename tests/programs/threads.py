"""Two threads that call one program at once."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier

import torch
import torch.fx._symbolic_trace
from programs import device
from programs.outcome import Outcome, Run, leaf_versions, named_tensors, terms
from programs.program import Setting
from torch import Tensor
from torch._dynamo import eval_frame

_THREADS = 2

#: Results, and gradients by name.
_Call = tuple[list[Tensor], dict[str, Tensor | None]]


def observe_in_threads(run: Run, setting: Setting) -> Outcome:
    """Call in two threads at once, where something is compiled; otherwise one after the other.

    Eager autocast has one cache of casts for all threads. A region that ends clears it with a lock held, and waits for
    Python where FakeTensors are in it, while Dynamo in the other thread holds Python and waits for the lock: torch
    itself hangs (pytorch/pytorch#119262). So what is compiled runs inside of a region that does not end in its thread.

    Raises RuntimeError if the program writes to what both share.
    """
    shared = dict(run.module.named_parameters()) | dict(run.module.named_buffers())
    versions = {name: (tensor._version, _number(tensor)) for name, tensor in shared.items()}
    barrier = Barrier(_THREADS)

    def work(number: int) -> _Call:
        with device.default_device():
            if run.afresh is not None:
                torch.autocast_increment_nesting()  # of the pool's thread, which ends with it
                barrier.wait()
            return _call(run, setting, number)

    calls = _at_once(work) if run.afresh is not None else [work(number) for number in range(_THREADS)]
    if any((tensor._version, _number(tensor)) != versions[name] for name, tensor in shared.items()):
        raise RuntimeError("the program writes to what two threads share")
    results = tuple(result for ours, _ in calls for result in ours)
    gradients = {f"{name} in thread {i}": g for i, (_, ours) in enumerate(calls) for name, g in ours.items()}
    state = {name: tensor.detach().clone() for name, tensor in shared.items()}
    return Outcome(results, gradients, state, None, frozenset(), frozenset(), frozenset())


def _number(tensor: Tensor) -> float:
    """A number that a write through ``.data`` changes: no version counts it."""
    return float(tensor.detach().double().nan_to_num().norm())


def _at_once(work: Callable[[int], _Call]) -> list[_Call]:
    with _flags_of_the_process(), ThreadPoolExecutor(_THREADS) as pool:
        calls = list(pool.map(work, range(_THREADS)))
    torch.clear_autocast_cache()
    return calls


@contextmanager
def _flags_of_the_process() -> Iterator[None]:
    """Turn off what torch leaves on when two threads trace at once: each restores what the other had set.

    After two eager calls of ops such as ``while_loop``, Dynamo compiles nothing after a graph break, in any thread;
    after two traces, torch.compile raises.
    """
    try:
        yield
    finally:
        torch.fx._symbolic_trace._is_fx_tracing_flag = False
        eval_frame._in_optimized_module = False
        getattr(eval_frame, "set_fullgraph_compiled_frame_count", abs)(-1)  # which torch 2.11 does not have


def _call(run: Run, setting: Setting, number: int) -> _Call:
    """One call and backward with inputs that no other thread has, each thread's of other values."""
    inputs = [_own(tensor, number) for tensor in run.inputs]
    named = named_tensors(run.module, inputs)
    leaves = {name: named[name] for name in leaf_versions(named)}
    results = list(run.call(*inputs))
    gradients: dict[str, Tensor | None] = dict.fromkeys(leaves)
    for loss in terms(results, named, setting):
        actual = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        gradients = dict(zip(leaves, actual, strict=True))
    return [result.detach().clone() for result in results], gradients


def _own(tensor: Tensor, number: int) -> Tensor:
    with torch.no_grad():
        own = tensor.detach().clone()
        if own.is_floating_point():
            own.mul_(1 + number)
    return own.requires_grad_(tensor.requires_grad)
