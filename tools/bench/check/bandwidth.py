"""The share of the memory's bandwidth that each kernel reaches on this GPU, and what its machine code permits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import fxamp
from fxamp import kernels
from fxamp.policy import Policy
from fxamp.tools.bench.kernel_count.devices import DEVICES, Device
from fxamp.tools.bench.kernel_count.subjects import STEPS, Subject, subjects
from fxamp.tools.bench.kernel_count.table import rows
from fxamp.tools.bench.kernels.timing import time_in_turn
from fxamp.tools.bench.kernels.work import copied, make_gradients

Run = Callable[[], object]
_GRADIENTS = {
    "check float16": (torch.float16, None),
    "check float32": (torch.float32, None),
    "unscale float32": (torch.float32, torch.float32),
    "float16 to float32": (torch.float16, torch.float32),
    "bfloat16 to float32": (torch.bfloat16, torch.float32),
}


@dataclass(frozen=True)
class Speed:
    """One kernel: bytes a second, their share of the GPU's bandwidth, that of a plain copy, and the counted share.

    ``of_peak`` and ``counted`` are None for a GPU that :data:`DEVICES` does not list.
    """

    kernel: str
    bandwidth: float
    of_copy: float
    of_peak: float | None
    counted: float | None


def speeds(device: str, parameters: int, rounds: int, gpu: Device | None) -> list[Speed]:
    """Time every kernel on ``parameters`` elements on ``device``; ``gpu``: its figures, if they are known."""
    result = []
    for subject in subjects():
        work = _work(subject, device, parameters) if subject.aligned and subject.ideal else None
        if work is None:
            continue
        moved = round(subject.ideal * parameters)
        times = time_in_turn({"kernel": work, "copy": copied(moved, device)}, device, rounds)
        rate = moved / times["kernel"].median
        counted = None if gpu is None else next(iter(rows([subject], [gpu]))).bound
        result.append(
            Speed(
                subject.name,
                rate,
                times["copy"].median / times["kernel"].median,
                None if gpu is None else rate / gpu.bandwidth,
                None if counted is None else counted.share,
            )
        )
    return result


def known_gpu(name: str) -> Device | None:
    """Return the listed GPU whose model is part of a name such as "NVIDIA H200"; None if there is none."""
    return next((each for each in DEVICES if each.name.split()[0] in name), None)


def _work(subject: Subject, device: str, parameters: int) -> Run | None:
    if subject.name in _GRADIENTS:
        return _gradient_work(*_GRADIENTS[subject.name], device, parameters)
    return _step_work(subject.name, device, parameters) if subject.name in STEPS else None


def _gradient_work(source: torch.dtype, target: torch.dtype | None, device: str, parameters: int) -> Run:
    gradients = make_gradients(parameters, source, device)
    inverse, found = torch.ones((), device=device), torch.zeros((), device=device)
    flags = torch.zeros(len(gradients), dtype=torch.int32, device=device)
    if target is None:
        return lambda: kernels.check_(gradients, found, flags)
    if target is source:
        return lambda: kernels.check_unscale_(gradients, inverse, found, flags)
    return lambda: kernels.check_unscale(gradients, inverse, target)


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


def documents(speeds: list[Speed]) -> list[Mapping[str, Any]]:
    """Return the rows as JSON's values."""
    return [vars(speed) for speed in speeds]
