"""The ops of a training step on CUDA, by FakeTensors; only for a process whose torch is prepared for it."""

import copy
from collections import Counter

import torch
from corpus import WIDE
from torch._subclasses.fake_tensor import FakeTensorMode
from zoo import MODELS, Batch, build

from fxamp.tools.bench.cost.count import Kernel
from fxamp.tools.bench.cost.eager import EagerOps
from fxamp.tools.bench.cost.simulated_gpu import compiling_for_gpu
from fxamp.tools.inputs.fake_program import fake_program
from fxamp.tools.inputs.model_file import Program


def ops_beside_autocast(_: None, name: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return the ops of a step of the model ``name`` in bfloat16: eager autocast's, and fxamp's with policy "auto"."""
    model, batch = build({**MODELS, **WIDE}[name])
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with compiling_for_gpu(), fake_program(Program(model, (), batch), mode, "cuda") as fake, mode:
        twin = copy.copy(model)
        twin.compile(backend="fxamp", options={"lowering": "eager"})
        return _ops(model, fake.kwargs), _ops(twin, fake.kwargs)


def _ops(model: torch.nn.Module, batch: Batch) -> dict[str, int]:
    """Return how often each op ran, with its stage and dtypes, but for copies of constants, which graphs alone make."""
    counts = Counter[str]()

    def count(kernel: Kernel) -> None:
        read, written = (", ".join(access.dtype for access in accesses) for accesses in (kernel.reads, kernel.writes))
        if not kernel.ops.startswith("lift_fresh"):
            counts[f"{kernel.stage}: {kernel.ops}({read}) -> {written}"] += 1

    def loss() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            result: torch.Tensor = model(**batch).loss
        return result

    loss()  # compiles
    model.zero_grad(set_to_none=True)
    with EagerOps(count) as ops:
        result = loss()
        ops.stage = "backward"
        result.backward()
    return dict(counts)
