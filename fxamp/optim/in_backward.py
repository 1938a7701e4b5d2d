"""Step parameters while the backward runs (``[optimizer] in_backward``), so that gradients do not pile up.

A compiled backward hands over gradients as soon as it has computed them, and the optimizer's own step runs for their
parameters. ``optimizer.step()`` then ends the iteration: it steps the other parameters. A second backward before it is
an error, as is stepping a parameter twice or with a part of its gradient.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fxamp.errors import OptionError
from fxamp.optim.reading.layout import optimized_parameters, settings_of
from fxamp.optim.tracing.stand_ins import plain_step, replaced_step
from fxamp.policy import Policy
from fxamp.reports.warnings import warn_once
from fxamp.torch_private import step_pre_hooks

_KINDS = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip
"""Optimizers of torch.optim that step each parameter independently, and keep no reference to its gradient."""

_IDLE = (
    "%s: its policy has in_backward = true, but no backward stepped anything: step() steps all gradients. Compile the "
    "model with this policy too: options={'policy': ...}"
)


class BackwardStep:
    """Steps one optimizer's parameters while backwards run; the optimizer's ``step()`` must follow each backward."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._stepped: dict[int, Tensor] = {}
        self._settings: list[dict[str, Any]] = []

    def require(self, parameters: Sequence[Tensor]) -> None:
        """Raise RuntimeError if the backward that begins cannot step ``parameters``."""
        optimizer = self._optimizer()
        assert optimizer is not None
        if step_pre_hooks(optimizer):
            raise RuntimeError(
                f"{subject(optimizer)}, and a hook runs before its step, which would find no gradients; accepted: an "
                "optimizer without register_step_pre_hook"
            )
        for parameter in parameters:
            name = _name(optimizer, parameter)
            if id(parameter) in self._stepped:
                raise RuntimeError(
                    f"{subject(optimizer)}, and parameter {name} gets a second gradient before optimizer.step(); "
                    "accepted: optimizer.step() after each backward, without gradient accumulation, and parameters "
                    "that one compiled graph uses once"
                )
            if parameter.grad is not None:
                raise RuntimeError(
                    f"{subject(optimizer)}, and parameter {name} has a gradient already, to which this backward would "
                    "add; accepted: zero_grad(set_to_none=True) before each backward, without gradient accumulation"
                )
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise RuntimeError(
                    f"{subject(optimizer)}, and parameter {name} has a hook on its gradient, which would not run; "
                    "accepted: parameters without hooks"
                )

    @torch.no_grad()
    def __call__(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Step ``parameters``, for which :meth:`require` was called, by their ``gradients``."""
        optimizer = self._optimizer()
        assert optimizer is not None
        self._settings = self._settings or _settings(optimizer)
        self._stepped.update({id(parameter): parameter for parameter in parameters})
        with _without_gradients(optimizer):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            try:
                plain_step(optimizer)(optimizer)
            finally:
                for parameter in parameters:
                    parameter.grad = None

    def close(self) -> None:
        """Begin the optimizer's ``step()``, which steps the parameters that no backward has stepped.

        Raises RuntimeError if a parameter was stepped with a part of its gradient, or with settings that changed since,
        or has left the optimizer's param_groups since.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        stepped, settings = self._stepped, self._settings
        self._stepped, self._settings = {}, []
        own = set(map(id, optimized_parameters(optimizer))) if stepped else set()
        for parameter in stepped.values():
            if id(parameter) not in own:
                raise RuntimeError(
                    f"{subject(optimizer)}, and a parameter {_name(optimizer, parameter)} left its param_groups "
                    "between the backward, which stepped it, and step(); accepted: changes of param_groups after step()"
                )
            if parameter.grad is not None:
                raise RuntimeError(
                    f"{subject(optimizer)}, and parameter {_name(optimizer, parameter)} was stepped in the backward "
                    "with a part of its gradient: code outside of the compiled graph added the rest to .grad; "
                    "accepted: parameters that one compiled graph uses once"
                )
        if settings and settings != _settings(optimizer):
            raise RuntimeError(
                f"{subject(optimizer)}, and its settings changed between the backward, which stepped with the old "
                "ones, and step(); accepted: changes after step(), as by scheduler.step()"
            )
        grads = any(parameter.grad is not None for parameter in optimized_parameters(optimizer))
        if grads and not stepped:
            warn_once(__name__, _IDLE, type(optimizer).__name__)


def steps_in_backward(optimizer: torch.optim.Optimizer, policy: Policy | None, clips: bool) -> bool:
    """Whether ``policy`` asks for steps of the optimizer's parameters in backwards.

    Raises OptionError for optimizers and policies that do not allow it, or if the step ``clips``.
    """
    if policy is None or policy.optimizer is None or not policy.optimizer.in_backward:
        return False
    require_policy(policy)
    kind = type(optimizer)
    if kind.__name__ not in _KINDS or kind is not getattr(torch.optim, kind.__name__, None) or replaced_step(optimizer):
        raise OptionError(
            f"{subject(optimizer)}; accepted: these classes of torch.optim, with their own step: {', '.join(_KINDS)}"
        )
    if clips:
        raise OptionError(
            f"{subject(optimizer)}, and clip_norm needs all gradients before the first step; accepted: no clipping"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise OptionError(f"{subject(optimizer)}; accepted: differentiable=False")
    return True


def require_policy(policy: Policy) -> None:
    """Raise OptionError if ``policy``, which has ``in_backward``, computes in float16: that needs a loss scale."""
    if policy.lower_precision_fp == "float16":
        raise OptionError(
            f"policy {policy.name!r} has in_backward = true and float16, whose loss is scaled; gradients are checked "
            "and unscaled after the backward; accepted: lower_precision_fp = 'bfloat16'"
        )


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each group; tensors, as of a learning rate, by their identity and number of writes."""
    return [
        {name: (id(value), value._version) if isinstance(value, Tensor) else value for name, value in group.items()}
        for group in settings_of(optimizer)
    ]


@contextmanager
def _without_gradients(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Hide the gradients of all parameters from the step inside."""
    parameters = [parameter for parameter in optimized_parameters(optimizer) if parameter.grad is not None]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def subject(optimizer: torch.optim.Optimizer) -> str:
    """Return the beginning of messages about the optimizer."""
    return f"{type(optimizer).__name__}: its policy has in_backward = true"


def _name(optimizer: torch.optim.Optimizer, parameter: Tensor) -> str:
    """Return the parameter's name as the optimizer knows it, else its group and position."""
    for number, group in enumerate(optimizer.param_groups):
        for at, own in enumerate(group["params"]):
            if own is parameter:
                names = group.get("param_names")
                return names[at] if names else f"group{number}.param{at}"
    return f"of shape {tuple(parameter.shape)}"
