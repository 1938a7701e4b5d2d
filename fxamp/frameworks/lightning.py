"""Lightning: a precision plugin that compiles the steps that Lightning calls, and scales in float16."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.model_helpers import is_overridden

from fxamp.backend.idle import warn_of
from fxamp.backend.registry import records_of
from fxamp.errors import OptionError
from fxamp.frameworks.setup import ScalerLike, device_of, setup
from fxamp.policy import Policy

#: What Lightning calls of a module, and compiles where a module was given to torch.compile.
_STEPS = ("forward", "training_step", "validation_step", "test_step", "predict_step")

#: Lightning's own code that steps call: Dynamo fails in it, or would compile what is no computation.
_LEFT_OUTSIDE = ("log", "log_dict", "print", "manual_backward", "optimizers", "lr_schedulers", "all_gather")


class FxampPrecision(MixedPrecision):  # type: ignore[misc]
    """``Trainer(plugins=[FxampPrecision(policy="cuda-float16")])``: nothing else changes.

    Lightning calls ``training_step`` and its kin, so those are compiled, while the Trainer works on the module; state
    keeps its names. A graph ends where a step calls ``self.log``: log last. In float16 the optimizer steps by
    ``scaler``, gradients are true from the backward on, and loggers get ``loss_scale`` and ``skipped_steps``.

    Args:
        policy: "auto", a built-in name, a path, or a Policy.
        scaler: a GradScaler; a dict of its arguments (``{"skip": "device"}``); None: as the policy says.
        options: further options of the backend.
        compile_arguments: torch.compile's, such as ``dynamic``.

    Raises:
        OptionError: an argument has a value that is not accepted; in training, a module that was compiled before.
    """

    def __init__(
        self,
        policy: str | Policy = "auto",
        scaler: ScalerLike = None,
        options: Mapping[str, Any] | None = None,
        **compile_arguments: Any,
    ) -> None:
        self._setup = setup(policy, scaler, options, compile_arguments)
        self.scaler = self._setup.scaler
        self.precision = "fxamp"
        self._replaced: list[tuple[LightningModule, str, Any]] = []
        self._looked_at: LightningModule | None = None

    def convert_module(self, module: torch.nn.Module) -> LightningModule:
        """Compile the steps that ``module`` defines."""
        if not isinstance(module, LightningModule):
            raise OptionError(f"FxampPrecision: expected a LightningModule, got {type(module).__name__}")
        if module._compiler_ctx is not None:
            raise OptionError(
                f"{type(module).__name__} was given to torch.compile before; FxampPrecision compiles it itself"
            )
        for name in _STEPS:
            if is_overridden(name, module, LightningModule):
                self._replace(module, name, self._setup.compile(getattr(module, name)))
        for name in _LEFT_OUTSIDE:
            outside = torch.compiler.disable(getattr(module, name))  # type: ignore[no-untyped-call]
            self._replace(module, name, outside)
        if self.scaler is not None:
            self.scaler.graph_scale(device_of(module))
        return module

    def teardown(self) -> None:
        """Leave the module as it was before the Trainer worked on it."""
        for module, name, before in reversed(self._replaced):
            delattr(module, name) if before is None else setattr(module, name, before)
        self._replaced.clear()

    def _replace(self, module: LightningModule, name: str, value: Callable[..., Any]) -> None:
        """Give ``module`` another method; remember its own, None for its class's."""
        self._replaced.append((module, name, vars(module).get(name)))
        setattr(module, name, value)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Nothing: the casts are in the graphs."""
        yield

    def optimizer_step(
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **arguments: Any
    ) -> Any:
        """Step, by the scaler if there is one, and log what it did."""
        result = super().optimizer_step(optimizer, model=model, closure=closure, **arguments)
        if self._looked_at is not model:
            self._looked_at = model
            if not records_of(model):
                warn_of(model)
        self._log(model)
        return result

    def _log(self, model: LightningModule) -> None:
        """Give loggers the scale and the skipped steps when they are due; only then the device is waited for."""
        trainer = model.trainer
        batches = trainer.fit_loop.epoch_loop._batches_that_stepped
        if self.scaler is None or (batches + 1) % trainer.log_every_n_steps:
            return
        shown = {"loss_scale": self.scaler.loss_scale, "skipped_steps": float(self.scaler.skipped_steps)}
        for logger in trainer.loggers:
            logger.log_metrics(shown, step=batches)
