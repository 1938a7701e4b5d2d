"""Every error that fxamp raises at a user.

A message says what was given, where, what is accepted instead, and the nearest match. One class a mistake, so that
each can be caught by itself; all derive from :class:`FxampError`.
"""

import difflib
from collections.abc import Iterable


class FxampError(Exception):
    """Base of all errors that fxamp raises on purpose."""


class OptionError(FxampError, ValueError):
    """An option of the backend or of a call is unknown, or has a value of the wrong kind."""


class PolicyError(FxampError, ValueError):
    """A policy cannot be found, read, or applied; names the file and the line where there is one."""


class BannedOpError(FxampError, RuntimeError):
    """The program calls an op that the policy refuses; carries the policy's advice."""


class CaptureError(FxampError, RuntimeError):
    """A model or function could not be captured as a graph."""


class ListingError(FxampError, ValueError):
    """A file that fxamp-show is to read is not what it should be; names the file and the line where there is one."""


class DoubleBackwardError(FxampError, RuntimeError):
    """Gradients of a compiled graph, made with create_graph=True, are differentiated; AOTAutograd's graphs refuse."""


class UnscaledError(FxampError, RuntimeError):
    """float16 outside of compiled graphs does what a scaler in the options cannot follow; it would lose the scale."""


class PassError(FxampError, RuntimeError):
    """A pass failed or broke its contract; names the pass, the node and the user's source line."""


def nearest(given: str, accepted: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the accepted name closest to ``given``, or ``""`` if none is close."""
    close = difflib.get_close_matches(given, list(accepted), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
