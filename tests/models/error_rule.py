"""When are gradients no further from the truth than eager autocast's?

The yardstick is eager autocast itself, over independent draws of the weights: the norms of its errors against float64
scatter by some factor, which says how far two runs that round equally well may differ. With ``s`` the standard
deviation of the logarithms of these norms, the means over ``n`` draws of two equally good programs differ by
``s * sqrt(2 / n)``; :data:`DEVIATIONS` of these are allowed. Only autocast's errors enter, so noise in what is judged
cannot widen the rule.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

import torch
from model_runs import Run

#: A normal variable exceeds four standard deviations once in 30,000 trials.
DEVIATIONS = 4.0
#: The largest relative error of rounding to bfloat16, which has 8 significant bits.
_ROUNDOFF = 2.0**-8


def relative_errors(runs: Sequence[Run], true: Sequence[Run]) -> list[float]:
    """By draw, the error of the whole gradient, all parameters as one vector, relative to the true gradient's norm."""
    return [_norm(_differences(run, truth)) / _norm(truth.gradients) for run, truth in zip(runs, true, strict=True)]


def excess(errors: Sequence[float], autocast: Sequence[float]) -> float:
    """How far ``errors`` exceed ``autocast`` on geometric average, as a share of what is allowed: 1 is the limit."""
    spread = statistics.stdev(map(math.log, autocast))
    ratio = statistics.fmean(map(math.log, errors)) - statistics.fmean(map(math.log, autocast))
    return ratio / (DEVIATIONS * spread * math.sqrt(2 / len(autocast)))


def worse_parameters(runs: Sequence[Run], autocast: Sequence[Run], true: Sequence[Run]) -> Iterator[str]:
    """The parameters whose gradient is further from float64 than autocast's by more than the rule allows.

    Each is judged by its own errors and the spread of all. A gradient that is zero in truth, a key bias's say, is all
    noise: what one rounding of a typical element of the whole gradient makes is allowed on top.
    """
    ours = {name: [_error(run, truth, name) for run, truth in zip(runs, true, strict=True)] for name in _names(true)}
    theirs = {
        name: [_error(run, truth, name) for run, truth in zip(autocast, true, strict=True)] for name in _names(true)
    }
    floors = {
        name: _ROUNDOFF * _typical(true[0].gradients) * math.sqrt(g.numel()) for name, g in true[0].gradients.items()
    }
    spread = _pooled_spread(theirs, floors)
    allowed = math.exp(DEVIATIONS * spread * math.sqrt(2 / len(runs)))
    for name, floor in floors.items():
        limit = _mean(theirs[name]) * allowed + floor
        if not _mean(ours[name]) <= limit:
            yield f"{name}: error {_mean(ours[name]):.3g}, autocast {_mean(theirs[name]):.3g}, limit {limit:.3g}"


def _pooled_spread(errors: Mapping[str, list[float]], floors: Mapping[str, float]) -> float:
    variances = [statistics.variance(math.log(max(e, floors[name])) for e in row) for name, row in errors.items()]
    return math.sqrt(statistics.fmean(variances))


def _names(true: Sequence[Run]) -> list[str]:
    return list(true[0].gradients)


def _differences(run: Run, truth: Run) -> dict[str, torch.Tensor]:
    return {name: run.gradients[name] - gradient for name, gradient in truth.gradients.items()}


def _error(run: Run, truth: Run, name: str) -> float:
    return float((run.gradients[name] - truth.gradients[name]).norm())


def _norm(gradients: Mapping[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))


def _typical(gradients: Mapping[str, torch.Tensor]) -> float:
    return _norm(gradients) / math.sqrt(sum(gradient.numel() for gradient in gradients.values()))


def _mean(errors: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean(e * e for e in errors))
