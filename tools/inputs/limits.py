"""Limits on what a graph's text can make a tool compute: numbers of 64 bits, bounded sequences, time and memory.

A text may come from anyone, and a line of it can ask for a number with a billion digits, or a billion results.
"""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from fxamp.errors import ListingError

#: The most bits of a number, and the most items of a sequence that is computed.
BITS, ITEMS = 64, 2**20

#: CPU seconds and bytes that rebuilding a graph may take, and what each statement of its text adds.
SECONDS, SECONDS_EACH = 60.0, 0.05
BYTES, BYTES_EACH = 4 * 2**30, 10**6

_PERIOD = 0.25  # CPU seconds between two looks
_RETRY = 2.0  # CPU seconds until the next exception, in case a destructor or callback swallows the first


class TooLarge(ValueError):
    """A value that no graph computes; the message says which."""


def require_small(operation: str, operands: Sequence[Any]) -> None:
    """Raise TooLarge if Python's ``operation`` ("pow", "mul") on these numbers or sequences makes a huge value."""
    numbers = [abs(operand) for operand in operands if isinstance(operand, int)]
    if any(number.bit_length() > BITS for number in numbers):
        raise TooLarge(f"a number of more than {BITS} bits")
    if operation in ("pow", "lshift", "round") and len(numbers) > 1:
        first, second, *_ = numbers
        bits = first.bit_length() * second if operation == "pow" else first.bit_length() + second
        if bits > 2 * BITS:
            raise TooLarge(f"a number of {bits} bits")
    items = _items(operands)
    if operation == "mul" and items and numbers:
        items *= max(numbers)
    if items > ITEMS:
        raise TooLarge(f"a sequence of more than {ITEMS} items")
    if operation == "mod" and isinstance(operands[0], str):
        raise TooLarge("text of any length")


def _items(operands: Sequence[Any]) -> int:
    """Return how many items are in the operands that are sequences, and in the sequences in these; stops at ITEMS."""
    count, waiting = 0, [operand for operand in operands if isinstance(operand, (list, tuple, str))]
    while waiting and count <= ITEMS:
        sequence = waiting.pop()
        count += len(sequence)
        waiting += [] if isinstance(sequence, str) else [item for item in sequence if isinstance(item, (list, tuple))]
    return count


class _Exhausted(BaseException):
    """The time or the memory of a text is used up. No handler of torch's catches it."""


@contextmanager
def limited(statements: int, file: str) -> Iterator[None]:
    """End the block with a ListingError once it has used more CPU time or memory than ``statements`` can need.

    Limits nothing where the system has no timers, and outside the main thread, which alone gets their signals.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    import resource

    start = resource.getrusage(resource.RUSAGE_SELF)
    seconds, most = SECONDS + SECONDS_EACH * statements, BYTES + BYTES_EACH * statements

    def look(number: int, frame: FrameType | None) -> None:
        now = resource.getrusage(resource.RUSAGE_SELF)
        if now.ru_utime - start.ru_utime > seconds or (now.ru_maxrss - start.ru_maxrss) * 1024 > most:
            signal.setitimer(signal.ITIMER_PROF, _RETRY)
            raise _Exhausted

    before = signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, _PERIOD, _PERIOD)
    try:
        yield
    except _Exhausted:
        took = f"{seconds:.0f} s or {most / 2**30:.0f} GiB"
        raise ListingError(f"{file}: computing the types of its values takes more than {took}") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
