"""Calls with an argument of an unknown name: the error gives the nearest name."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from fxamp.errors import ArgumentError, nearest

F = TypeVar("F", bound=Callable[..., Any])


def named_arguments(called: F) -> F:
    """Let calls of ``called``, a function or class, with an argument of an unknown name raise ArgumentError."""
    function: Any = vars(called)["__init__"] if isinstance(called, type) else called
    parameters = inspect.signature(function).parameters
    named = {name: part for name, part in parameters.items() if part.kind is not part.VAR_POSITIONAL}
    accepted = tuple(name for name in named if name not in ("self", "cls"))

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs.keys() - named.keys():
            raise ArgumentError(
                f"{called.__qualname__} has no argument {name!r}{nearest(name, accepted)}; accepted: "
                f"{', '.join(accepted)}"
            )
        return function(*args, **kwargs)

    if not isinstance(called, type):
        return call  # type: ignore[return-value]
    called.__init__ = call  # type: ignore[misc]
    return called
