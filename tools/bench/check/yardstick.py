"""When a gradient or a trained weight is exact enough: no further from float64 than another way's, the yardstick.

Over independent draws of the weights the norms of the yardstick's errors scatter by some factor, which shows how far
two ways that round equally well may differ: with ``s`` the standard deviation of the logarithms of these norms, the
means over ``n`` draws of two equally good ways differ by ``s * sqrt(2 / n)``.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fxamp.tools.bench.check.check_line import require

if TYPE_CHECKING:
    from torch import Tensor

#: A normal variable exceeds four standard deviations once in 30,000 trials.
DEVIATIONS = 4.0
#: The minimum scatter that a few draws are assumed to have, in case the yardstick's errors are alike in all.
LEAST_SPREAD = 0.05

Values = Mapping[str, "Tensor"]


def relative_error(values: Values, true: Values) -> float:
    """Return the norm of all differences over that of the true values; infinite if any value is not finite."""
    difference = math.sqrt(sum(float((values[name].double() - t).square().sum()) for name, t in true.items()))
    error = difference / math.sqrt(sum(float(t.square().sum()) for t in true.values()))
    return error if math.isfinite(error) else math.inf


def require_as_exact(ours: Sequence[float], yardstick: Sequence[float]) -> str:
    """Require that our errors are no larger than the yardstick's, beyond its scatter; return the ratio as text.

    Raises AssertionError. Both have one error for each draw, and at least two. If the yardstick has no error, ours must
    have none.
    """
    require(all(map(math.isfinite, ours)), "inf or NaN")
    if not all(yardstick):
        require(not any(ours), f"an error of {max(ours):.2g}, where there is none")
        return "no error"
    if not all(ours):
        return "no error"
    spread = max(statistics.stdev(map(math.log, yardstick)), LEAST_SPREAD)
    ratio = math.exp(statistics.fmean(map(math.log, ours)) - statistics.fmean(map(math.log, yardstick)))
    limit = math.exp(DEVIATIONS * spread * math.sqrt(2 / len(yardstick)))
    text = f"error {statistics.fmean(ours):.2g}, {ratio:.2f} of the yardstick's"
    require(ratio <= limit, f"{text}; accepted: {limit:.2f}")
    return text
