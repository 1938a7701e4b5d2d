"""The child's side of a process that measures: it answers requests with numbers.

It reads one JSON object a line from stdin, and writes one for each to where stdout was; anything else that is printed
goes to stderr. The first object says what to measure, and is answered by {}; every other one is
``{"do": NAME, "with": {...}}``.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

Answer = dict[str, Any]


def serve(start: Callable[[Answer], Any], answers: Mapping[str, Callable[..., Answer]]) -> int:
    """Serve requests until stdin ends. After an error, answer ``{"error": text}``, and raise it.

    ``start`` makes of the first request what is measured; ``answers`` are called with that and a request's arguments.
    """
    to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        measured = start(json.loads(sys.stdin.readline()))
        _answer(to, {})
        for line in sys.stdin:
            request = json.loads(line)
            _answer(to, answers[request["do"]](measured, **request["with"]))
    except Exception as error:
        _answer(to, {"error": f"{type(error).__name__}: {_first_line(error)}"})
        raise
    return 0


def _answer(to: TextIO, value: Answer) -> None:
    to.write(json.dumps(value) + "\n")
    to.flush()


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
