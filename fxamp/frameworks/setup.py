"""What a framework is given for fxamp: how models are compiled, and the scaler that belongs to them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fxamp.backend import fxamp
from fxamp.errors import OptionError
from fxamp.policy import Policy
from fxamp.scaler import GradScaler

ScalerLike = GradScaler | Mapping[str, Any] | None


@dataclass(frozen=True, eq=False)
class Setup:
    """``policy``, ``options``: of the backend; ``arguments``: of torch.compile. ``scaler``: None where none is needed.

    Build it by :func:`setup`.
    """

    policy: str | Policy
    scaler: GradScaler | None
    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def compile(self, function: Callable[..., Any]) -> Any:
        """Return ``function`` compiled."""
        return torch.compile(function, **self._given())

    def compile_in_place(self, module: torch.nn.Module) -> None:
        """Compile the calls of ``module``, whose state keeps its names."""
        module.compile(**self._given())

    def _given(self) -> dict[str, Any]:
        options = {"policy": self.policy, **self.options}
        if self.scaler is not None:
            options["scaler"] = self.scaler
        return {"backend": fxamp, "options": options, **self.arguments}


def setup(
    policy: str | Policy, scaler: ScalerLike, options: Mapping[str, Any] | None, arguments: Mapping[str, Any]
) -> Setup:
    """Check what was given and make the scaler, attached: losses stay as they are, and gradients are true.

    Args:
        policy: "auto", a built-in name, a path, or a Policy.
        scaler: a GradScaler; its arguments, for one with the policy's settings otherwise; or None: one for a policy
            in float16, and none for another.
        options: the backend's others, such as ``{"lowering": "aot_eager"}``.
        arguments: torch.compile's, such as ``dynamic``.

    Raises:
        OptionError: ``scaler`` is of another kind; ``options`` has what is an argument here.
        PolicyError: the policy does not exist or is mistaken.
    """
    taken = {"policy", "scaler"} & set(options or {})
    if taken:
        raise OptionError(f"options has {sorted(taken)[0]!r}, which is an argument of its own here")
    if not isinstance(scaler, GradScaler):
        scaler = _made(policy, scaler)
    scaler = scaler if scaler is not None and scaler.is_enabled() else None
    if scaler is not None:
        scaler.attach()
    return Setup(policy, scaler, dict(options or {}), dict(arguments))


def _made(policy: str | Policy, given: Any) -> GradScaler | None:
    if given is not None and not isinstance(given, Mapping):
        raise OptionError(
            f"scaler={given!r}, of type {type(given).__module__}.{type(given).__name__}; accepted: an "
            "fxamp.GradScaler, a dict of its arguments, or None"
        )
    if policy != "auto":
        return GradScaler.from_policy(policy, **(given or {}))
    return None if given is None else GradScaler(**given)


def device_of(model: torch.nn.Module) -> torch.device:
    """The device of the first parameter; the CPU for a model without any."""
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device
