"""What a policy's step costs on a GPU, counted in other processes while this one measures errors."""

import os
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxamp.errors import OptionError
from fxamp.policy import Policy
from fxamp.tools.bench.cost.count import Count
from fxamp.tools.bench.cost.hooks import prepare_torch
from fxamp.tools.bench.cost.process import count
from fxamp.tools.bench.cost.row import Row, row
from fxamp.tools.bench.cost.workload import Way, Workload
from fxamp.tools.bench.process import ContenderFailed, Process

#: Processes at a time, of less than 1 GiB each.
_MOST = 4

_PROGRAM = """from fxamp.tools.inputs.model_file import program
from fxamp.tools.policy.fit.counts import resized
from fxamp.tools.policy.fit.depth import cut

whole = program({file!r}, lambda _: None)
model = cut(whole.model, {depth})
inputs = resized((whole.args, whole.kwargs), {batch})
"""


@dataclass(frozen=True)
class Form:
    """The size that is counted: how many layers of each kind, and which ``batch``; 0 means the model's own."""

    depth: int = 0
    batch: int = 0


@dataclass
class Counting:
    """Counts the model of ``file`` under policies; a context manager, for its processes and files.

    Each is counted once. An error ends the running counts.
    """

    file: str
    _folder: Any = field(default_factory=lambda: tempfile.TemporaryDirectory(prefix="fxamp-fit-"))
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(min(_MOST, os.cpu_count() or 1)))
    _processes: dict[int, Process] = field(default_factory=dict)
    _rows: dict[tuple[str, Form], "Future[Row]"] = field(default_factory=dict)

    def row(self, policy: Policy, form: Form = Form()) -> "Future[Row]":
        """Count a step under ``policy``. The future raises OptionError, with the reason, where that cannot be done."""
        key = policy.digest, form
        if key not in self._rows:
            self._rows[key] = self._pool.submit(self._row, policy, form)
        return self._rows[key]

    def _row(self, policy: Policy, form: Form) -> Row:
        return row(policy.name, policy.name, self._ask(policy, form))

    def _ask(self, policy: Policy, form: Form) -> Count:
        folder, at = Path(self._folder.name), threading.get_ident()
        path, program = folder / f"{policy.digest[:32]}.toml", folder / f"{form.depth}-{form.batch}-{at}.py"
        path.write_text(policy.dumps(), encoding="utf-8")
        text = _PROGRAM.format(file=str(Path(self.file).resolve()), **asdict(form))
        program.write_text(text, encoding="utf-8")
        try:
            if at not in self._processes:
                self._processes[at] = Process(prepare_torch)
            return self._processes[at].ask(count, Workload(str(program), policy.lower_precision_fp), Way(str(path)))
        except ContenderFailed as failed:
            if at in self._processes:
                self._processes.pop(at).close()
            raise OptionError(f"{self.file}: counting under policy {policy.name!r}: {failed}") from failed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        if error is not None:
            for process in [*self._processes.values()]:
                process.kill()
        self._pool.shutdown()
        for process in self._processes.values():
            process.close()
        self._folder.cleanup()


def batch_of(inputs: Any) -> int:
    """Return the batch of a model's inputs: the first dimension of their first tensor, 0 if none has a dimension."""
    return next((len(v) for v in pytree.tree_leaves(inputs) if isinstance(v, Tensor) and v.dim()), 0)


def resized(inputs: Any, batch: int) -> Any:
    """Return ``inputs`` with ``batch`` as the first dimension wherever that is :func:`batch_of`; as they are for 0.

    The tensors that differ are on "meta".
    """
    own = batch_of(inputs)

    def resize(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim() or len(value) != own:
            return value
        return torch.empty((batch, *value.shape[1:]), dtype=value.dtype, device="meta")

    return pytree.tree_map(resize, inputs) if batch else inputs
