"""Every error that fxamp raises for the user.

A message names the wrong value, its place, what is accepted instead, and the nearest match. There is one class per kind
of mistake; all derive from :class:`FxampError`.
"""

import difflib
from collections.abc import Iterable, Sequence


class FxampError(Exception):
    """Base class of all errors that fxamp raises on purpose."""


class OptionError(FxampError, ValueError):
    """An option of the backend or of a call is unknown, or has an invalid value."""


class ArgumentError(OptionError, TypeError):
    """A call has an argument of an unknown name."""


class PolicyError(FxampError, ValueError):
    """A policy cannot be found, read, or applied; the message names the file and the line if there is one."""


class BannedOpError(FxampError, RuntimeError):
    """The program calls an op that the policy bans; the message contains the policy's advice."""


class CaptureError(FxampError, RuntimeError):
    """A model or function could not be captured as a graph."""


class MachineError(FxampError, RuntimeError):
    """This machine lacks what a lowering needs, such as a C++ compiler."""


class VersionError(FxampError, ImportError):
    """The installed torch is too old."""


class ListingError(FxampError, ValueError):
    """A file for fxamp-show is invalid; the message names the file and the line if there is one."""


class DoubleBackwardError(FxampError, RuntimeError):
    """A program differentiates gradients of a compiled graph (create_graph=True), which has no second derivatives."""


class UnscaledError(FxampError, RuntimeError):
    """A scaler in the options cannot follow float16 code outside the compiled graphs; gradients could underflow."""


class UnsupportedOpError(FxampError, NotImplementedError):
    """An op cannot run on a tensor that fxamp keeps in a form of its own; the message says what to call first."""


class DroppedResultError(FxampError, RuntimeError):
    """A program reads a result that a policy's rule drops; the message names the policy, the rule and its line."""


class NonFiniteError(FxampError, ArithmeticError):
    """A compiled graph produced an inf or a NaN; the message names the op. ``found``: the same as data."""

    def __init__(self, message: str, found: object = None) -> None:
        super().__init__(message)
        self.found = found


class PassError(FxampError, RuntimeError):
    """A pass failed or broke its contract; the message names the pass, the node and the user's source line."""


def require_choice(name: str, value: object, accepted: Sequence[str]) -> None:
    """Raise OptionError unless ``value`` is one of the ``accepted``; the message calls it ``name``."""
    if value not in accepted:
        raise OptionError(
            f"{name}={value!r}: expected one of {', '.join(map(repr, accepted))}{nearest(str(value), accepted)}"
        )


def nearest(text: str, accepted: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the accepted name closest to ``text``, or ``""`` if none is close."""
    close = difflib.get_close_matches(text, list(accepted), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
