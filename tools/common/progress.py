"""Progress of long work: a bar with its rate and the time left on a terminal, nothing elsewhere."""

import sys
from typing import Any, TextIO

from tqdm import tqdm

from fxamp.tools.common.output import visible


def bar(label: str, total: int | None, unit: str, stream: TextIO | None = None) -> Any:
    """Return a tqdm bar of ``total`` steps (None: unknown) on ``stream``, else on stderr; silent if not a terminal.

    Use it as a context manager, and call its ``update``.
    """
    shown: TextIO | None = sys.stderr if stream is None else stream
    silent = True if shown is None else None
    return tqdm(desc=label, total=total, unit=unit, file=shown, disable=silent, leave=False, dynamic_ncols=True)


def say(text: str) -> None:
    """Print a line on stderr, above the bars that are shown."""
    if sys.stderr is not None:
        tqdm.write(visible(text), file=sys.stderr)
