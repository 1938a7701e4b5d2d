"""One contender's optimizer alone, which steps the parameters of GPT-2."""

import time
from collections.abc import Iterator
from itertools import count, islice

import torch
from torch import Tensor, nn

import fxamp
from fxamp.optim import CompiledOptimizer
from fxamp.tools.bench.train.experiment import Contender, Experiment
from fxamp.tools.bench.train.training import Training, make_optimizer

VOCABULARY, POSITIONS = 50_257, 1024


class Stepping(Training):
    """A training without a model: each step finds the same gradients."""

    def __init__(self, experiment: Experiment, contender: Contender) -> None:
        self.experiment, self.contender = experiment, contender
        self.batches = []
        self.scaler = torch.amp.GradScaler(experiment.device, enabled=False)
        shapes = islice(shapes_of_gpt2(experiment.changed["width"]), experiment.changed["tensors"])
        self.module = nn.ParameterList(torch.full(shape, 0.5, device=experiment.device) for shape in shapes)
        for parameter in self.module:
            parameter.grad = torch.full_like(parameter, 0.25)
        self.optimizer = make_optimizer(self.module, experiment, **contender.options)
        start = time.perf_counter()
        if contender.compiler == "fxamp":
            policy = contender.policy or None
            self.optimizer = fxamp.compile_optimizer(self.optimizer, policy, lowering=experiment.lowering)
        self.compiled = self.optimizer.step
        if contender.compiler == "torch":
            self.compiled = torch.compile(self.optimizer.step, backend=experiment.lowering)
        self.compile_call = time.perf_counter() - start
        self._losses = []

    def forward(self) -> Tensor:
        """Return no loss."""
        return torch.empty(())

    def finish(self, loss: Tensor) -> None:
        """Make one step."""
        self.compiled()

    @property
    def report(self) -> None:
        """No graph is reported."""

    @property
    def notes(self) -> list[str]:
        """Why fxamp runs a step op by op, if it does."""
        if self.contender.compiler != "fxamp":
            return []
        return list(CompiledOptimizer.of(self.optimizer).reasons)


def shapes_of_gpt2(width: int) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of GPT-2's parameters for any number of layers, in their order with the last norm first."""
    yield from ((VOCABULARY, width), (POSITIONS, width), (width,), (width,))
    for _ in count():
        yield from ((width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,))
        yield from ((width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,))
