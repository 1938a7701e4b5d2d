"""What a policy's step costs on a GPU, by the count, in one process for all policies."""

import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fxamp.errors import OptionError
from fxamp.policy import Policy
from fxamp.tools.bench.cost.count import Count
from fxamp.tools.bench.cost.row import Row, row
from fxamp.tools.bench.cost.workload import Workload
from fxamp.tools.bench.process import ContenderFailed, Process
from fxamp.tools.policy.fit.store import Store


@dataclass
class Counting:
    """Counts the model of ``file`` under one policy after another; a context manager, for its process and its files."""

    file: str
    store: Store
    fresh: int = 0
    _folder: Any = field(default_factory=lambda: tempfile.TemporaryDirectory(prefix="fxamp-fit-"))
    _process: Process | None = None

    def row(self, policy: Policy) -> Row:
        """Return the counts of a step under ``policy``. Raises OptionError, with the reason, if there are none."""
        workload = Workload(str(Path(self.file).resolve()), policy.lower_precision_fp)
        key = ("count", policy.digest, workload)
        fields = self.store.get(*key)
        if fields is None:
            counted = row(policy.name, policy.name, Count.from_dict(self._ask(policy, workload)))
            fields = asdict(counted)
            self.store.put(fields, *key)
            self.fresh += 1
        return Row(**fields)

    def _ask(self, policy: Policy, workload: Workload) -> dict[str, Any]:
        path = Path(self._folder.name) / f"{policy.digest[:32]}.toml"
        path.write_text(policy.dumps(), encoding="utf-8")
        try:
            if self._process is None:
                self._process = Process("fxamp.tools.bench.cost.process", {}, None)
            return self._process.ask("count", workload=workload.as_dict(), policy=str(path))
        except ContenderFailed as failed:
            self._end()
            raise OptionError(f"{self.file}: counting under policy {policy.name!r}: {failed}") from failed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._folder.cleanup()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()
