"""The backend's options, checked before anything is traced."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxamp.backend.policy_in_force import absolute
from fxamp.errors import OptionError, nearest
from fxamp.lowering_names import LOWERINGS, inductor_modes
from fxamp.policy import Policy
from fxamp.reports.dumps import check_folder

if TYPE_CHECKING:
    from fxamp.scaler import GradScaler


NONFINITE = ("log", "raise")
"""The values of option "nonfinite"."""


@dataclass(frozen=True)
class Options:
    """The user's options, named as in ``torch.compile(..., options=...)``.

    ``policy``: "auto", a built-in name, an absolute path, or a Policy; ``named``: the name or path before it was
    resolved. ``by_environment``: whether the environment names the policy, or could do so, because no option does.
    ``lowering``: one of :data:`fxamp.lowering_names.LOWERINGS`. ``inductor``: Inductor config patches. ``mode``:
    Inductor's mode. ``scaler``: the backward graphs scale, unscale and check with it; a disabled one counts as none.
    ``dump``: the graph of every stage is written to this folder as text. ``nonfinite``: "log" or "raise": what to do
    with the first op whose result is not finite; None: do not look.
    """

    policy: str | Policy = "auto"
    named: str = ""
    by_environment: bool = True
    lowering: str = "inductor"
    inductor: Mapping[str, Any] = field(default_factory=dict)
    mode: str | None = None
    scaler: "GradScaler | None" = None
    dump: Path | None = None
    nonfinite: str | None = None


def parse_options(options_by_name: Mapping[str, Any] | None, mode: str | None = None) -> Options:
    """Check ``options_by_name`` and fill in the defaults; ``mode`` is torch.compile's own argument.

    The environment variables of :data:`_VARIABLES` replace missing options. Raises OptionError for an unknown option, a
    value of the wrong type, or two different modes.
    """
    by_environment = options_by_name is None or "policy" not in options_by_name
    named_in: object = os.environ if by_environment else options_by_name
    options_by_name = dict(options_by_name or {})
    for name in options_by_name:
        if name not in _CHECKS:
            raise OptionError(f"unknown option {name!r}{nearest(str(name), _CHECKS)}; accepted: {', '.join(_CHECKS)}")
    for name, variable in _VARIABLES.items():
        if name not in options_by_name and os.environ.get(variable):
            options_by_name[name] = os.environ[variable]
    if mode is not None and options_by_name.get("mode", mode) != mode:
        raise OptionError(f"mode={mode!r} and options={{'mode': {options_by_name['mode']!r}}} contradict each other")
    if mode is not None:
        options_by_name["mode"] = mode
    checked = {name: _CHECKS[name](value) for name, value in options_by_name.items()}
    policy = checked.get("policy")
    if isinstance(policy, str):
        checked |= {"policy": absolute(policy, named_in), "named": policy}
    options = Options(**checked, by_environment=by_environment)
    if options.lowering != "inductor" and (options.inductor or options.mode):
        option = "inductor" if options.inductor else "mode"
        raise OptionError(f"option {option!r} is Inductor's, but lowering is {options.lowering!r}")
    return options


def option_names() -> tuple[str, ...]:
    """Return the names of all options."""
    return tuple(_CHECKS)


def _policy(value: Any) -> str | Policy:
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, (str, Policy)):
        return value
    raise _wrong_kind("policy", value, '"auto", a built-in name, a path to a .toml file, or an fxamp.Policy')


def _one_of(name: str, accepted: tuple[str, ...]) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if value in accepted:
            return str(value)
        hint = nearest(value, accepted) if isinstance(value, str) else ""
        raise OptionError(f"option {name!r} is {value!r}{hint}; accepted: {', '.join(map(repr, accepted))}")

    return check


def _inductor(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong_kind("inductor", value, "a dict of Inductor config settings")
    from torch._inductor import config

    known = config.get_config_copy()
    for key in value:
        if key not in known:
            raise OptionError(f"option 'inductor' has the unknown Inductor setting {key!r}{nearest(str(key), known)}")
    return dict(value)


def _mode(value: Any) -> str:
    return _one_of("mode", inductor_modes())(value)


def _scaler(value: Any) -> "GradScaler | None":
    if value is None:
        return None
    from fxamp.scaler import GradScaler

    if not isinstance(value, GradScaler):
        raise _wrong_kind("scaler", value, "an fxamp.GradScaler, which takes the arguments of torch.amp.GradScaler")
    return value if value.is_enabled() else None


def _dump(value: Any) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        raise _wrong_kind("dump", value, "the path of a folder")
    return check_folder(os.fspath(value))


def _nonfinite(value: Any) -> str | None:
    return None if value is None else _one_of("nonfinite", NONFINITE)(value)


def _wrong_kind(name: str, value: Any, accepted: str) -> OptionError:
    return OptionError(f"option {name!r} is {value!r}, of type {type(value).__name__}; accepted: {accepted}")


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "policy": _policy,
    "lowering": _one_of("lowering", LOWERINGS),
    "inductor": _inductor,
    "mode": _mode,
    "scaler": _scaler,
    "dump": _dump,
    "nonfinite": _nonfinite,
}

_VARIABLES = {"policy": "FXAMP_POLICY", "dump": "FXAMP_DUMP", "nonfinite": "FXAMP_NONFINITE"}
