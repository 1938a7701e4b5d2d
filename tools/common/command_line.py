"""Command lines of all tools: errors that name the nearest match; exit status 2 for a user's mistake."""

import argparse
import math
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from fxamp.errors import FxampError, nearest
from fxamp.tools.common.interrupt import SoFar
from fxamp.tools.common.output import notice, put, write_text

#: The exit status after a bug in fxamp itself: sysexits' EX_SOFTWARE.
FAULT = 70


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors: what was given, the nearest match, what is accepted. No abbreviated options."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Print ``message`` on stderr and exit with status 2."""
        option = message.removeprefix("unrecognized arguments: ").split()[0].partition("=")[0]
        if message.startswith("unrecognized arguments") and option.startswith("-"):
            accepted = sorted(name for name in self._option_string_actions if name.startswith("--"))
            message = f"unknown option {option!r}{nearest(option, accepted)}; accepted: {', '.join(accepted)}"
        if message.startswith("the following arguments are required"):
            message = f"{message}; {' '.join(self.format_usage().split())}"
        notice(f"{self.prog}: {message}")
        raise SystemExit(2)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print the help, which argparse does by this method."""
        if file is sys.stderr and file is not None:
            return notice(message.removesuffix("\n"))
        if guarded(self.prog, lambda: write_text(message)):
            raise SystemExit(2)
        return None


def one_of(*accepted: str) -> Callable[[str], str]:
    """Return an argparse ``type`` that accepts one of ``accepted``, and names the nearest match for anything else."""

    def check(text: str) -> str:
        if text not in accepted:
            raise argparse.ArgumentTypeError(
                f"{text!r} is unknown{nearest(text, accepted)}; accepted: {', '.join(accepted)}"
            )
        return text

    return check


def _whole(least: int) -> Callable[[str], int]:
    """Return an argparse ``type``: a whole number, ``least`` or more."""

    def check(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
        return int(text)

    return check


positive, natural = _whole(1), _whole(0)


def number(accepted: str, holds: Callable[[float], bool]) -> Callable[[str], float]:
    """Return an argparse ``type``: a finite number for which ``holds``; ``accepted`` are the words for such numbers."""

    def check(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not holds(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {accepted}")
        return value

    return check


positive_number = number("a number greater than 0", lambda value: value > 0)


def guarded(prog: str, run: Callable[[], int | None]) -> int:
    """Run a tool, and return its exit status: its own, or 2 after a user's mistake, which is one message on stderr.

    A call of ``sys.exit`` is such a mistake: only a user's code calls it, for example a model's forward. Ctrl-C is
    status 130; the results until then (:class:`SoFar`) are printed first. Anything else that is raised is a bug in
    fxamp: status 70 (:data:`FAULT`) after the traceback.
    """
    try:
        return _run(prog, run)
    except FxampError as error:  # of printing what an interrupted tool has
        notice(f"{prog}: {error}")
        return 2


def _run(prog: str, run: Callable[[], int | None]) -> int:
    try:
        return run() or 0
    except FxampError as error:
        notice(f"{prog}: {error}")
        return 2
    except OSError as error:
        notice(f"{prog}: {f'{error.filename}: ' if error.filename else ''}{error.strerror or error}")
        return 2
    except (MemoryError, RecursionError) as error:
        notice(f"{prog}: its input is too {'large' if isinstance(error, MemoryError) else 'deeply nested'}")
        return 2
    except SystemExit as error:
        notice(
            f"{prog}: {_caller(error)}: this line ends the program by exit({error.code!r}); accepted: code that returns"
        )
        return 2
    except KeyboardInterrupt as error:
        if isinstance(error, SoFar):
            put(error.text)
        notice(f"\n{prog}: interrupted")
        return 130
    except Exception as error:
        notice("".join(traceback.format_exception(error)))
        notice(f"{prog}: a bug in fxamp, not in its input: {type(error).__name__}")
        return FAULT


def _caller(error: SystemExit) -> str:
    """Return ``file:line`` of the call of sys.exit, or of Python's exit or quit."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "_sitebuiltins" not in frame.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno}"
