"""Progress of long work: a bar with its rate and the time left on a terminal, nothing elsewhere."""

import sys
from typing import Any, TextIO

from tqdm import tqdm


def bar(label: str, total: int | None, unit: str, stream: TextIO | None = None) -> Any:
    """Return a tqdm bar of ``total`` steps (None: unknown) on ``stream``, or on stderr; silent if that is no terminal.

    Use it as a context manager, and call its ``update``.
    """
    shown: TextIO = sys.stderr if stream is None else stream
    return tqdm(desc=label, total=total, unit=unit, file=shown, disable=None, leave=False, dynamic_ncols=True)


def say(text: str) -> None:
    """Print a line on stderr, above the bars that are shown."""
    tqdm.write(text, file=sys.stderr)
