"""Contenders in processes of their own, which step in turn, so that drift affects all of them alike.

Each process lays out memory in its own way while it runs: the page alignment of weights, the order of sets,
the cores that threads run on. So each contender is started several times, and differences between its starts are noise
like those between rounds. Within a start the order of turns rotates, and runs backwards in every second round: no
contender always comes first, or always after the same one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fxamp.tools.bench.process import ContenderFailed, Process
from fxamp.tools.bench.train.worker import steps as train_steps
from fxamp.tools.common.progress import bar

Answer = dict[str, Any]
_T = TypeVar("_T")


@dataclass
class Runner:
    """A contender's process of one start, and its answers.

    ``answers``: of each start by the name of the question, ``rounds``: of each start by round. ``failed``: why it has
    left the rounds.
    """

    name: str
    process: Process | None = None
    answers: list[dict[str, Answer]] = field(default_factory=list)
    rounds: list[list[Answer]] = field(default_factory=list)
    failed: str = ""

    def started(self, process: Process) -> None:
        """Begin another start, by a new process."""
        self.process = process
        self.answers.append({})
        self.rounds.append([])

    def ask(self, task: Callable[..., Answer], **arguments: Any) -> Answer:
        """Let the process do a task; the answer is also kept under its name."""
        assert self.process is not None
        self.answers[-1][task.__name__] = self.process.ask(task, **arguments)
        return self.answers[-1][task.__name__]

    def attempt(self, task: Callable[["Runner"], object]) -> None:
        """Do a task unless an earlier one failed; keep the reason of the first failure."""
        if self.failed:
            return
        try:
            task(self)
        except ContenderFailed as error:
            self.failed = str(error)


def take_turns(runners: Sequence[Runner], rounds: int, steps: int, label: str) -> bool:
    """Let each make ``steps`` steps in each round, in turn; return False if Ctrl-C ended the rounds after some.

    Only whole rounds are kept then. ``label``: of the progress that a terminal shows.
    """
    with bar(label, rounds, "round") as shown:
        for number in range(rounds):
            try:
                for runner in order(runners, number):
                    runner.attempt(lambda one: one.rounds[-1].append(one.ask(train_steps, count=steps)))
            except KeyboardInterrupt:
                if not number:
                    raise
                for runner in runners:
                    del runner.rounds[-1][number:]
                return False
            shown.update()
    return True


def order(things: Sequence[_T], number: int) -> list[_T]:
    """Return the order of turns in a round, or of processes in a start: rotated, and every second one backwards."""
    at = number // 2 % max(len(things), 1)
    rotated = [*things[at:], *things[:at]]
    return rotated[::-1] if number % 2 else rotated
