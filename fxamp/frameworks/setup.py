"""Shared by all frameworks: compile a model, and create the scaler for it."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch

from fxamp.backend import fxamp
from fxamp.backend.options import option_names, parse_options
from fxamp.errors import ArgumentError, OptionError, nearest
from fxamp.policy import Policy
from fxamp.reports.warnings import warn_once
from fxamp.scaler import GradScaler

#: Arguments of torch.compile that fxamp sets itself.
_SET_HERE = ("backend", "options")

ScalerLike = GradScaler | Mapping[str, Any] | None


@dataclass(frozen=True, eq=False)
class Setup:
    """The backend's ``policy`` and ``options``, torch.compile's ``arguments``; ``scaler``: None if not needed.

    Create it with :func:`setup`.
    """

    policy: str | Policy
    scaler: GradScaler | None
    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def compile(self, function: Callable[..., Any]) -> Any:
        """Return the compiled ``function``."""
        return torch.compile(function, **self._compile_arguments())

    def compile_in_place(self, module: torch.nn.Module) -> None:
        """Compile ``module`` in place; the names in its ``state_dict`` do not change."""
        module.compile(**self._compile_arguments())

    def _compile_arguments(self) -> dict[str, Any]:
        options = {"policy": self.policy, **self.options}
        if self.scaler is not None:
            options["scaler"] = self.scaler
        return {"backend": fxamp, "options": options, **self.arguments}


def setup(
    called: str,
    policy: str | Policy,
    scaler: ScalerLike,
    options: Mapping[str, Any] | None,
    arguments: Mapping[str, Any],
    own: Sequence[str] = (),
) -> Setup:
    """Check the arguments, and create an attached scaler: only compiled backwards scale; ``.grad`` is unscaled.

    Args:
        called: the name of the callable that takes these arguments, and its ``own`` ones.
        policy: "auto", a built-in name, a path, or a Policy.
        scaler: a GradScaler; or its arguments, which override the policy's settings; or None: a scaler if the policy
            is for float16, else none.
        options: further options of the backend, such as ``{"lowering": "aot_eager"}``.
        arguments: arguments of torch.compile, such as ``dynamic``.

    Raises:
        ArgumentError: torch.compile has no such argument.
        OptionError: ``scaler`` has another type; or ``options`` contains an argument of this function, or what the
            backend refuses.
        PolicyError: the policy does not exist or is invalid.
    """
    options, arguments = dict(options or {}), dict(arguments)
    _require_known(called, arguments, own)
    if (mode := arguments.pop("mode", None)) is not None:
        options.setdefault("mode", mode)  # torch.compile takes one of ``mode`` and ``options``
    taken = {"policy", "scaler"} & set(options)
    if taken:
        raise OptionError(f"options contains {sorted(taken)[0]!r}; accepted: the argument {sorted(taken)[0]}=")
    parse_options({"policy": policy, **options}, mode)
    if not isinstance(scaler, GradScaler):
        scaler = _scaler_for(policy, scaler)
    scaler = scaler if scaler is not None and scaler.is_enabled() else None
    if scaler is not None:
        scaler.attach()
    return Setup(policy, scaler, options, arguments)


def _require_known(called: str, arguments: Mapping[str, Any], own: Sequence[str]) -> None:
    """Raise ArgumentError for a name that torch.compile does not have, such as an option of the backend."""
    kinds = inspect.signature(torch.compile).parameters.values()
    of_compile = [part.name for part in kinds if part.kind is part.KEYWORD_ONLY and part.name not in _SET_HERE]
    own = ["policy", "scaler", "options", *own]
    in_options = [name for name in option_names() if name not in own + of_compile]
    for name in arguments:
        if name in in_options:
            raise ArgumentError(f"{called} has no argument {name!r}; accepted: options={{{name!r}: ...}}")
        if name not in of_compile:
            hint = nearest(name, own + of_compile + in_options)
            raise ArgumentError(
                f"{called} has no argument {name!r}{hint}; accepted: {', '.join(own)}; of torch.compile: "
                f"{', '.join(of_compile)}; in options: {', '.join(in_options)}"
            )


def _scaler_for(policy: str | Policy, value: Any) -> GradScaler | None:
    if value is not None and not isinstance(value, Mapping):
        raise OptionError(
            f"scaler={value!r}, of type {type(value).__module__}.{type(value).__name__}; accepted: an "
            "fxamp.GradScaler, a dict of its arguments, or None"
        )
    if policy != "auto":
        return GradScaler.from_policy(policy, **(value or {}))
    return None if value is None else GradScaler(**value)


def warn_untested(package: str) -> None:
    """Log once if ``package`` does not have the version (major and minor) that fxamp is tested with."""
    try:
        requirements, installed = metadata.requires("fxamp") or [], metadata.version(package)
    except metadata.PackageNotFoundError:
        return
    for requirement in requirements:
        match = re.match(rf"{package}==([\w.]+)", requirement)
        if match and match[1].split(".")[:2] != installed.split(".")[:2]:
            warn_once(__name__, "%s %s is installed; fxamp is tested with %s", package, installed, match[1])


def device_of(model: torch.nn.Module) -> torch.device:
    """Return the device of the first parameter, or the CPU for a model without parameters."""
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device
