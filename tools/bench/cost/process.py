"""Counts in a process of its own, whose torch is prepared before anything imports it: both sides of it.

Its first request is {}; each other one, "count", is answered with a count.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from fxamp.errors import OptionError
from fxamp.tools.bench.cost.count import Count
from fxamp.tools.bench.cost.hooks import prepare_torch
from fxamp.tools.bench.cost.workload import Way, Workload
from fxamp.tools.bench.process import Answer, ContenderFailed, Process, serve


def counts(requests: Iterable[tuple[Workload, Way]]) -> Iterator[Count]:
    """Count one request after another. Raises OptionError where that cannot be done here."""
    label = "counting"
    try:
        with Process("fxamp.tools.bench.cost.process", {}, None) as process:
            for workload, way in requests:
                label = way.label
                yield Count.from_dict(process.ask("count", workload=workload.as_dict(), policy=way.policy))
    except ContenderFailed as failed:
        raise OptionError(f"{label}: {failed}") from failed


def _count(pretended: bool, workload: dict[str, Any], policy: str) -> Answer:
    from fxamp.tools.bench.cost.measure import measure

    return measure(Workload(**workload), Way(policy), pretended).as_dict()


if __name__ == "__main__":
    raise SystemExit(serve(lambda _: prepare_torch(), {"count": _count}))
