"""Lightning: a precision plugin that compiles the methods that Lightning calls, and scales the loss in float16."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.model_helpers import is_overridden

from fxamp.errors import OptionError
from fxamp.frameworks.setup import ScalerLike, device_of, setup, warn_untested
from fxamp.policy import Policy
from fxamp.reports.idle import warn_of
from fxamp.reports.registry import records_of

warn_untested("lightning")

#: The methods of a module that Lightning calls.
_STEPS = ("forward", "training_step", "validation_step", "test_step", "predict_step")

#: Lightning's own methods that steps call. They stay outside the graphs, because Dynamo fails in them or they compute
#: nothing.
_LEFT_OUTSIDE = ("log", "log_dict", "print", "manual_backward", "optimizers", "lr_schedulers", "all_gather")


class FxampPrecision(MixedPrecision):  # type: ignore[misc]
    """``Trainer(plugins=[FxampPrecision(policy="cuda-float16")])``: nothing else changes.

    Lightning calls ``training_step``, ``validation_step`` and so on, so these methods are compiled while the Trainer
    runs. Names in the ``state_dict`` do not change. A call of ``self.log`` breaks the graph: log at the end of a step.
    In float16 the optimizer steps through ``scaler``, gradients are unscaled after the backward, and loggers receive
    ``loss_scale`` and ``skipped_steps``.

    Args:
        policy: "auto", a built-in name, a path, or a Policy.
        scaler: a GradScaler; a dict of its arguments (``{"skip": "device"}``); None: the policy decides.
        options: further options of the backend.
        compile_arguments: arguments of torch.compile, such as ``dynamic``.

    Raises:
        OptionError: an argument is unknown or has an invalid value; in training: the module is compiled already.
    """

    def __init__(
        self,
        policy: str | Policy = "auto",
        scaler: ScalerLike = None,
        options: Mapping[str, Any] | None = None,
        **compile_arguments: Any,
    ) -> None:
        self._setup = setup("FxampPrecision", policy, scaler, options, compile_arguments)
        self.scaler = self._setup.scaler
        self.precision = "fxamp"
        self._replaced: list[tuple[LightningModule, str, Any]] = []
        self._checked: LightningModule | None = None

    def convert_module(self, module: torch.nn.Module) -> LightningModule:
        """Compile the steps that ``module`` defines."""
        if not isinstance(module, LightningModule):
            raise OptionError(f"FxampPrecision: expected a LightningModule, got {type(module).__name__}")
        if module._compiler_ctx is not None:
            raise OptionError(
                f"{type(module).__name__} is compiled already; accepted: the module itself; FxampPrecision compiles it"
            )
        for name in _STEPS:
            if is_overridden(name, module, LightningModule):
                self._replace(module, name, self._setup.compile(getattr(module, name)))
        for name in _LEFT_OUTSIDE:
            outside = torch.compiler.disable(getattr(module, name))  # type: ignore[no-untyped-call]
            self._replace(module, name, outside)
        if self.scaler is not None:
            self.scaler.scale(torch.zeros((), device=device_of(module)))
        return module

    def teardown(self) -> None:
        """Restore the module's own methods."""
        for module, name, before in reversed(self._replaced):
            delattr(module, name) if before is None else setattr(module, name, before)
        self._replaced.clear()

    def _replace(self, module: LightningModule, name: str, value: Callable[..., Any]) -> None:
        """Replace a method of ``module``; remember its own attribute, or None if the class defined it."""
        self._replaced.append((module, name, vars(module).get(name)))
        setattr(module, name, value)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Do nothing: the graphs contain the casts."""
        yield

    def optimizer_step(
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **arguments: Any
    ) -> Any:
        """Step, through the scaler if there is one, and log its scale and skipped steps."""
        result = super().optimizer_step(optimizer, model=model, closure=closure, **arguments)
        if self._checked is not model:
            self._checked = model
            if not records_of(model):
                warn_of(model)
        self._log(model)
        return result

    def _log(self, model: LightningModule) -> None:
        """Log the scale and the skipped steps every ``log_every_n_steps``; waits for the device only then."""
        trainer = model.trainer
        batches = trainer.fit_loop.epoch_loop._batches_that_stepped
        if self.scaler is None or (batches + 1) % trainer.log_every_n_steps:
            return
        shown = {"loss_scale": self.scaler.loss_scale, "skipped_steps": float(self.scaler.skipped_steps)}
        for logger in trainer.loggers:
            logger.log_metrics(shown, step=batches)
