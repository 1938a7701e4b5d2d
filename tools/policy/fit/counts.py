"""What a policy's step costs on a GPU, by the count: in another process, while this one measures errors."""

import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fxamp.errors import OptionError
from fxamp.policy import Policy
from fxamp.tools.bench.cost.count import Count
from fxamp.tools.bench.cost.hooks import prepare_torch
from fxamp.tools.bench.cost.process import count
from fxamp.tools.bench.cost.row import Row, row
from fxamp.tools.bench.cost.workload import Way, Workload
from fxamp.tools.bench.process import ContenderFailed, Process
from fxamp.tools.policy.fit.store import Store

_SHORT = """from fxamp.tools.inputs.model_file import program
from fxamp.tools.policy.fit.layers import shorten

whole = program({!r}, lambda _: None)
model, inputs = shorten(whole.model), (whole.args, whole.kwargs)
"""


@dataclass
class Counting:
    """Counts the model of ``file`` under policies, one after another; a context manager, for its process and files.

    It ends after the count that is going on, which is kept. ``fresh``: how many counts were not in ``store``.
    """

    file: str
    store: Store
    fresh: int = 0
    _folder: Any = field(default_factory=lambda: tempfile.TemporaryDirectory(prefix="fxamp-fit-"))
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    _process: Process | None = None

    def row(self, policy: Policy, short: bool = False) -> "Future[Row]":
        """Count a step under ``policy``; ``short``: of the model with few layers of each kind.

        The future raises OptionError, with the reason, where that cannot be counted.
        """
        return self._pool.submit(self._row, policy, short)

    def _row(self, policy: Policy, short: bool) -> Row:
        workload = Workload(str(Path(self.file).resolve()), policy.lower_precision_fp)
        key = ("count", policy.digest, workload, short)
        fields = self.store.get(*key)
        if fields is None:
            counted = row(policy.name, policy.name, self._ask(policy, workload, short))
            fields = asdict(counted)
            self.store.put(fields, *key)
            self.fresh += 1
        return Row(**fields)

    def _ask(self, policy: Policy, workload: Workload, short: bool) -> Count:
        folder = Path(self._folder.name)
        path, program = folder / f"{policy.digest[:32]}.toml", folder / "short.py"
        path.write_text(policy.dumps(), encoding="utf-8")
        program.write_text(_SHORT.format(workload.model), encoding="utf-8")
        few = replace(workload, model=str(program)) if short else workload
        try:
            if self._process is None:
                self._process = Process(prepare_torch)
            return self._process.ask(count, few, Way(str(path)))
        except ContenderFailed as failed:
            self._end()
            raise OptionError(f"{self.file}: counting under policy {policy.name!r}: {failed}") from failed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._end()
        self._folder.cleanup()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()
