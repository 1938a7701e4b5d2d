"""Compiles each contender's step with fresh caches, then makes steps in turn, so that drift affects all alike."""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fxamp.tools.bench.process import ContenderFailed, Process
from fxamp.tools.bench.step.contenders import CONTENDERS
from fxamp.tools.bench.step.setup import Setup
from fxamp.tools.bench.step.worker import WARM_UP
from fxamp.tools.common.progress import bar

WORKER = "fxamp.tools.bench.step.worker"


@dataclass
class Measured:
    """One contender's step; times in seconds.

    ``first``, ``first_cpu``: a first torch.compile, of one addition, elapsed and of CPU time; ``compiling``,
    ``compiling_cpu``: the first steps after it, less so many ordinary ones. None where nothing compiles. ``steps``: the
    mean of each round. ``failed``: why there are no numbers.
    """

    name: str
    first: float | None = None
    first_cpu: float | None = None
    compiling: float | None = None
    compiling_cpu: float | None = None
    steps: list[float] = field(default_factory=list)
    failed: str = ""

    def as_dict(self) -> dict[str, Any]:
        """JSON's values, under the names of the fields."""
        return asdict(self)


def measure(setup: Setup, names: Sequence[str], rounds: int, steps: int, say: Callable[[str], None]) -> list[Measured]:
    """Measure the contenders ``names``, each in a process of its own; one that fails leaves the rounds."""
    found = [Measured(name) for name in names]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fxamp-bench-")))
        running: list[tuple[Measured, Process]] = []
        for each in found:
            say(f"{each.name}, {setup.parameters} parameters: first steps ...")
            try:
                first = {"setup": setup.as_dict(), "contender": each.name}
                process = stack.enter_context(Process(WORKER, first, folder / each.name))
                _compile(each, process, setup)
            except ContenderFailed as error:
                each.failed = str(error)
            else:
                running.append((each, process))
        with bar("rounds", rounds, "round") as shown:
            for _ in range(rounds):
                for each, process in running:
                    each.steps.append(process.ask("steps", count=steps)["seconds"])
                shown.update()
    for each, _ in running:
        ordinary = WARM_UP * statistics.median(each.steps)
        if each.compiling is not None and each.compiling_cpu is not None:
            each.compiling = max(0.0, each.compiling - ordinary)
            each.compiling_cpu = max(0.0, each.compiling_cpu - ordinary)
    return found


def _compile(each: Measured, process: Process, setup: Setup) -> None:
    compiles = CONTENDERS[each.name].compiles
    if compiles and setup.lowering == "inductor":
        answer = process.ask("first_compile")
        each.first, each.first_cpu = answer["seconds"], answer["cpu"]
    answer = process.ask("warm_up")
    if compiles:
        each.compiling, each.compiling_cpu = answer["seconds"], answer["cpu"]
