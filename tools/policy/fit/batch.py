"""The largest batch that fits, by counts alone."""

from collections.abc import Callable

#: The largest batch that is counted.
MOST = 1 << 20

#: After this many counts the rest is halved, not interpolated.
_INTERPOLATED = 10


def largest(memory: Callable[[int], float], batch: int, limit: float) -> dict[int, float]:
    """Return the bytes of each batch that was counted: the largest within ``limit`` and the next one are among them.

    ``memory`` counts a batch. ``batch``: the first one to count. Where not even 1 fits, that is the least one in the
    result; where :data:`MOST` fits, that is the largest. If memory shrinks here and there as the batch grows, the
    search may end early, and a larger batch may fit too.
    """
    bytes_of = {batch: memory(batch)}
    while True:
        low = max((n for n, bytes_ in bytes_of.items() if bytes_ <= limit), default=0)
        high = min((n for n, bytes_ in bytes_of.items() if n > low), default=MOST + 1)
        if high <= low + 1:
            return bytes_of
        at = _guess(bytes_of, limit, low, high)
        bytes_of[at] = memory(at)


def _guess(bytes_of: dict[int, float], limit: float, low: int, high: int) -> int:
    """Return a batch above ``low`` and below ``high`` whose bytes are near ``limit``."""
    most = min(high - 1, 64 * low or high // 2)
    if len(bytes_of) == 1:
        return min(2 * low or high // 2, most)
    if len(bytes_of) > _INTERPOLATED:
        return min((low + high) // 2, most)
    first, last = sorted(sorted(bytes_of, key=lambda n: abs(bytes_of[n] - limit))[:2])
    slope = (bytes_of[last] - bytes_of[first]) / (last - first)
    guess = int(first + (limit - bytes_of[first]) / slope) if slope > 0 else most
    return max(low + 1, min(guess, most))
