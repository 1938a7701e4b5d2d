"""Contenders in processes of their own, which step in turn, so that drift affects all of them alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fxamp.tools.bench.process import ContenderFailed, Process
from fxamp.tools.bench.train.worker import steps as train_steps
from fxamp.tools.common.progress import bar

Answer = dict[str, Any]


@dataclass
class Runner:
    """A contender's process, and its answers: by name, and of each round. ``failed``: why it has left the rounds."""

    name: str
    process: Process | None = None
    answers: dict[str, Answer] = field(default_factory=dict)
    rounds: list[Answer] = field(default_factory=list)
    failed: str = ""

    def ask(self, task: Callable[..., Answer], **arguments: Any) -> Answer:
        """Let the process do a task; the answer is also kept under its name."""
        assert self.process is not None
        self.answers[task.__name__] = self.process.ask(task, **arguments)
        return self.answers[task.__name__]

    def attempt(self, task: Callable[["Runner"], object]) -> None:
        """Do a task unless one has failed; the first that fails says why there is no other."""
        if self.failed:
            return
        try:
            task(self)
        except ContenderFailed as error:
            self.failed = str(error)


def take_turns(runners: Sequence[Runner], rounds: int, steps: int) -> int:
    """Let each make ``steps`` steps in each round, in turn; return the number of whole rounds.

    Ctrl-C after the first round ends them, so that they are fewer than planned.
    """
    with bar("rounds", rounds, "round") as shown:
        for number in range(rounds):
            try:
                for runner in runners:
                    runner.attempt(lambda runner: take_turn(runner, steps))
            except KeyboardInterrupt:
                if not number:
                    raise
                for runner in runners:
                    del runner.rounds[number:]
                return number
            shown.update()
    return rounds


def take_turn(runner: Runner, steps: int) -> None:
    """Let one make its steps, and keep the answer."""
    runner.rounds.append(runner.ask(train_steps, count=steps))
