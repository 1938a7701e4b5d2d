"""The share of the memory's bandwidth that each kernel reaches on this GPU, and what its machine code permits."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

import fxamp
from fxamp import kernels
from fxamp.policy import Policy
from fxamp.tools.bench.cost.kernels.devices import DEVICES, Device
from fxamp.tools.bench.cost.kernels.rows import rows
from fxamp.tools.bench.cost.kernels.subjects import STEPS, Subject, subjects
from fxamp.tools.bench.report import Spread, spread

Run = Callable[[], object]
_GRADIENTS = {
    "check float16": (torch.float16, None),
    "check float32": (torch.float32, None),
    "unscale float32": (torch.float32, torch.float32),
    "float16 to float32": (torch.float16, torch.float32),
    "bfloat16 to float32": (torch.bfloat16, torch.float32),
}
#: How gradients, large and small, share the parameters: those of one of a transformer's layers.
_SHARES = (64, 64, 16, 16, 1, 1)
_LAYERS = 12
#: The minimum length of a timed stretch in seconds, with which the clocks' error is below a thousandth.
_LEAST = 0.01


def speeds(device: str, parameters: int, rounds: int, gpu: Device | None) -> list[dict[str, Any]]:
    """Time every kernel on ``parameters`` elements on ``device``; ``gpu``: its figures, if they are known.

    A row has bytes a second; the times of a plain copy of as many bytes, and of torch's op if there is one, over the
    kernel's; its share of the GPU's bandwidth, and the counted share, both None for a GPU without figures.
    """
    result = []
    for subject in subjects():
        work = _work(subject, device, parameters) if subject.aligned and subject.ideal else None
        if work is None:
            continue
        moved = round(subject.ideal * parameters)
        times = time_in_turn({"copy": _copied(moved, device), **work}, rounds)
        own = times["kernel"].median
        counted = None if gpu is None else next(rows(subject, [gpu])).bound
        result.append(
            {
                "kernel": subject.name,
                "bandwidth": moved / own,
                "of_copy": times["copy"].median / own,
                "of_torch": times["torch"].median / own if "torch" in times else None,
                "of_peak": None if gpu is None else moved / own / gpu.bandwidth,
                "counted": None if counted is None else counted.share,
            }
        )
    return result


def known_gpu(name: str) -> Device | None:
    """Return the listed GPU that torch calls by a name such as "NVIDIA H200"; None if there is none.

    Boards of the same chip with slower memory are not listed.
    """
    slower = any(board in name.upper() for board in ("PCI", "NVL", "40GB", "LAPTOP"))
    return None if slower else next((gpu for gpu in DEVICES if gpu.name in name), None)


def _work(subject: Subject, device: str, parameters: int) -> dict[str, Run] | None:
    if subject.name in _GRADIENTS:
        return gradient_work(*_GRADIENTS[subject.name], device, parameters)
    return {"kernel": _step_work(subject.name, device, parameters)} if subject.name in STEPS else None


def gradient_work(source: torch.dtype, target: torch.dtype | None, device: str, parameters: int) -> dict[str, Run]:
    """Return the check of gradients, by the kernel and by torch's ops, which read and write every gradient in place.

    ``target``: the dtype that the kernel unscales them to; None if it only reads them.
    """
    gradients = make_gradients(parameters, source, device)
    inverse, flag = torch.ones((), device=device), torch.zeros((), device=device)
    flags = torch.zeros(len(gradients), dtype=torch.int32, device=device)

    def by_torch() -> list[Tensor]:
        wide = gradients if target in (None, source) else [gradient.to(target) for gradient in gradients]
        torch._amp_foreach_non_finite_check_and_unscale_(wide, flag, inverse)
        return wide

    if target is None:
        return {"kernel": lambda: kernels.check_(gradients, flag, flags), "torch": by_torch}
    if target is source:
        return {"kernel": lambda: kernels.check_unscale_(gradients, inverse, flag, flags), "torch": by_torch}
    return {"kernel": lambda: kernels.check_unscale(gradients, inverse, target), "torch": by_torch}


def _step_work(name: str, device: str, parameters: int) -> Run:
    """Return the compiled step of parameters with gradients; the first two steps make the state and compile."""
    step = STEPS[name]
    own = [nn.Parameter(part) for part in make_gradients(parameters, step.dtype, device)]
    for parameter in own:
        parameter.grad = torch.full_like(parameter, 1e-3)
    policy = Policy.loads(f'extends = ["{device}-bfloat16"]\n[optimizer]\n{step.table}\n') if step.table else None
    optimizer = fxamp.compile_optimizer(step.make(own), policy)
    optimizer.step()
    return optimizer.step


def make_gradients(parameters: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Return gradients with ``parameters`` finite elements in total, at least one: matrices and biases of 12 layers."""
    parts = [parameters * share // (sum(_SHARES) * _LAYERS) for share in _SHARES] * _LAYERS
    parts[0] += parameters - sum(parts)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(parameters, generator=generator).to(device, dtype)
    return [part.clone() for part in torch.split(whole, parts) if part.numel()]


def _copied(nbytes: int, device: str) -> Run:
    """Return a plain copy that reads and writes ``nbytes`` in total: the lower bound for this traffic."""
    source = torch.zeros(max(nbytes // 8, 1), dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def time_in_turn(work: Mapping[str, Run], rounds: int) -> dict[str, Spread]:
    """Return the seconds of each piece of work by name: median and quartiles over ``rounds``, which do all in turn.

    torch's timer waits for the GPU around each stretch. The first stretch compiles, fills caches, and determines how
    often a stretch repeats the work.
    """
    timers = {name: Timer("run()", globals={"run": run}) for name, run in work.items()}
    repeats = {name: timer.blocked_autorange(min_run_time=_LEAST).number_per_run for name, timer in timers.items()}
    samples: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, timer in timers.items():
            samples[name].append(timer.timeit(repeats[name]).median)
    return {name: spread(values) for name, values in samples.items()}
