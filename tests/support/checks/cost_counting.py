"""One process that counts costs for many tests: it prepares torch for seconds before its first count."""

from collections.abc import Iterator

from fxamp.tools.bench.cost.count import Count
from fxamp.tools.bench.cost.process import counts
from fxamp.tools.bench.cost.workload import Way, Workload


class Counting:
    """Counts one workload at a time, in a process that starts with the first, and again after one that failed."""

    def __init__(self) -> None:
        self._asked: list[tuple[Workload, Way]] = []
        self._answers: Iterator[Count] | None = None

    def __call__(self, workload: Workload, way: Way) -> Count:
        self._asked.append((workload, way))
        if self._answers is None:
            self._answers = counts(iter(self._asked.pop, None))
        try:
            return next(self._answers)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        answers, self._answers = self._answers, None
        if answers is not None:
            answers.close()  # type: ignore[attr-defined]
