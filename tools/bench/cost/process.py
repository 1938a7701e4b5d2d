"""Counts in a process of its own, whose torch is prepared before anything imports it."""

from collections.abc import Iterable, Iterator

from fxamp.errors import OptionError
from fxamp.tools.bench.cost.count import Count
from fxamp.tools.bench.cost.hooks import prepare_torch
from fxamp.tools.bench.cost.workload import Way, Workload
from fxamp.tools.bench.process import ContenderFailed, Process


def counts(requests: Iterable[tuple[Workload, Way]]) -> Iterator[Count]:
    """Count one request after another. Raises OptionError where that cannot be done here."""
    label = "counting"
    try:
        with Process(prepare_torch) as process:
            for workload, way in requests:
                label = way.label
                yield process.ask(count, workload, way)
    except ContenderFailed as failed:
        raise OptionError(f"{label}: {failed}") from failed


def count(_: None, workload: Workload, way: Way) -> Count:
    """Count one request, in a process that :func:`prepare_torch` has prepared."""
    from fxamp.tools.bench.cost.measure import measure

    return measure(workload, way)
