"""One contender's model, optimizer and scaler, and its training step."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fxamp.policy import Policy
from fxamp.reports.report import Report, report
from fxamp.scaler import GradScaler
from fxamp.tools.bench.models import Batch, LossAlone, build
from fxamp.tools.bench.train.experiment import FUSED, OPTIMIZERS, Contender, Experiment
from fxamp.tools.bench.train.fp8 import autocast_for_torchao, convert_by_torchao
from fxamp.tools.common.policy_step import optimizer_precision, stepped_by_policy

#: The number of batches that the steps cycle through.
BATCHES = 4
RATE = 1e-3


class Training:
    """Trains ``experiment.model`` as the contender does. The loss of each step stays on its device until it is read."""

    def __init__(self, experiment: Experiment, contender: Contender) -> None:
        module, batches = build(experiment.model, experiment.size, experiment.seed, BATCHES, experiment.changed)
        self.experiment = experiment
        self.contender = contender
        self.module = (module if experiment.all_results else LossAlone(module)).to(experiment.device)
        if contender.fp8:
            self.module = convert_by_torchao(self.module, contender, experiment.device)
        self.batches = [{name: value.to(experiment.device) for name, value in batch.items()} for batch in batches]
        self.optimizer = _optimizer(self.module, experiment, contender)
        self.scaler = _scaler(experiment, contender)
        start = time.perf_counter()
        self.compiled = _compiled(self.module, experiment, contender, self.scaler)
        #: Seconds of the call of torch.compile, which imports its modules; the first steps compile the graphs.
        self.compile_call = time.perf_counter() - start
        self._losses: list[Tensor] = []

    def forward(self) -> Tensor:
        """Return the loss of the next batch."""
        loss = self.loss(self.batches[len(self._losses) % BATCHES])
        self._losses.append(loss.detach())
        return loss

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch."""
        with self._autocast():
            return loss_of(self.compiled, batch)

    def finish(self, loss: Tensor) -> None:
        """Compute gradients of the loss, clip them if the experiment says so, and update parameters and scale."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if self.experiment.max_norm is not None:
            self._clip(self.experiment.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Run one whole training step without waiting for the device."""
        self.finish(self.forward())

    def wait(self) -> None:
        """Wait until the device has finished its work."""
        if self.experiment.device == "cuda":
            torch.cuda.synchronize()

    @property
    def losses(self) -> list[float]:
        """Return the loss of every step so far, each before its update."""
        return [loss.item() for loss in self._losses]

    @property
    def loss_scale(self) -> float | None:
        """The current scale, None without a scaler."""
        if not self.scaler.is_enabled():
            return None
        return self.scaler.loss_scale if isinstance(self.scaler, GradScaler) else self.scaler.get_scale()

    @property
    def report(self) -> Report | None:
        """fxamp's report; None for the other contenders."""
        return report(self.compiled) if self.contender.compiler == "fxamp" else None

    @property
    def notes(self) -> list[str]:
        """What a reader must know about the numbers."""
        policy = self.contender.policy
        if not policy or self.experiment.policy_optimizer or optimizer_precision(policy) is None:
            return []
        return ["torch's optimizer; --policy-optimizer keeps its state as the policy's [optimizer] table says."]

    def _clip(self, max_norm: float) -> None:
        if isinstance(self.scaler, GradScaler):
            self.scaler.clip_grad_norm_(self.optimizer, max_norm)
            return
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def _autocast(self) -> AbstractContextManager[Any]:
        if not self.contender.autocast:
            return nullcontext()
        if self.contender.fp8:
            return autocast_for_torchao(self.experiment.device, getattr(torch, self.experiment.lower_dtype))
        return torch.autocast(self.experiment.device, getattr(torch, self.experiment.lower_dtype))


def loss_of(model: Any, batch: Batch) -> Tensor:
    """Call a model, compiled or not, and return its loss."""
    result = model(**batch)
    loss: Tensor = result if isinstance(result, Tensor) else result.loss
    return loss


def _optimizer(module: torch.nn.Module, experiment: Experiment, contender: Contender) -> torch.optim.Optimizer:
    """Return the optimizer, compiled if the contender's policy says how state is kept, and the experiment uses that."""
    if experiment.policy_optimizer and contender.policy and optimizer_precision(contender.policy) is not None:
        return stepped_by_policy(make_optimizer(module, experiment), contender.policy, experiment.lowering)
    fused = {"fused": True} if contender.fused and experiment.optimizer in FUSED else {}
    return make_optimizer(module, experiment, **fused)


def make_optimizer(module: torch.nn.Module, experiment: Experiment, **form: bool) -> torch.optim.Optimizer:
    """Return the experiment's optimizer of a module's parameters; ``form``: arguments such as ``fused=True``."""
    kind: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, experiment.optimizer)
    return kind(module.parameters(), lr=RATE, **OPTIMIZERS[experiment.optimizer], **form)


def _scaler(experiment: Experiment, contender: Contender) -> torch.amp.GradScaler:
    enabled = bool(contender.scaler) and _lower_dtype(experiment, contender) == "float16"
    if contender.scaler == "fxamp":
        lowering = "inductor" if experiment.lowering == "inductor" else "aot_eager"
        options = {"step_lowering": lowering, **contender.scaler_options}
        return GradScaler(experiment.device, enabled=enabled, **options)
    return torch.amp.GradScaler(experiment.device, enabled=enabled)


def _lower_dtype(experiment: Experiment, contender: Contender) -> str:
    """Return the 16-bit dtype of the contender's products: its own policy's, else the experiment's."""
    if contender.policy in ("", "auto"):
        return experiment.lower_dtype
    return Policy.load(contender.policy).lower_precision_fp


def _compiled(
    module: torch.nn.Module, experiment: Experiment, contender: Contender, scaler: torch.amp.GradScaler
) -> Any:
    if not contender.compiler:
        return module
    if contender.compiler == "torch":
        return torch.compile(module, backend=experiment.lowering)
    policy = contender.policy or ("auto" if experiment.dtype == "auto" else f"{experiment.device}-{experiment.dtype}")
    options = {"policy": policy, "lowering": experiment.lowering, **contender.options}
    if scaler.is_enabled():
        options["scaler"] = scaler
    return torch.compile(module, backend="fxamp", options=options)
