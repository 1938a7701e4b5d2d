"""The largest batch that fits, by counts alone."""

from collections.abc import Callable

#: After so many counts the rest is halved, not interpolated.
_INTERPOLATED = 10


def largest(memory: Callable[[int], float], batch: int, limit: float) -> dict[int, float]:
    """Return the bytes of each batch that was counted: the largest within ``limit`` and the next one are among them.

    ``memory`` counts a batch; it grows with the batch. ``batch``: the first one to count. Where not even 1 fits, that
    is the least one in the result.
    """
    counted = {batch: memory(batch)}
    while True:
        low = max((n for n, bytes_ in counted.items() if bytes_ <= limit), default=0)
        high = min((n for n, bytes_ in counted.items() if bytes_ > limit), default=0)
        if high == low + 1:
            return counted
        at = _guess(counted, limit, low, high)
        counted[at] = memory(at)


def _guess(counted: dict[int, float], limit: float, low: int, high: int) -> int:
    """Return a batch above ``low`` and below ``high`` (0: none known) whose bytes are near ``limit``."""
    if len(counted) == 1:
        return 2 * low or high // 2
    if high and len(counted) > _INTERPOLATED:
        return (low + high) // 2
    first, last = sorted(sorted(counted, key=lambda n: abs(counted[n] - limit))[:2])
    slope = (counted[last] - counted[first]) / (last - first)
    guess = int(first + (limit - counted[first]) / slope) if slope > 0 else 2 * last
    return max(low + 1, min(guess, high - 1 if high else 64 * low))
