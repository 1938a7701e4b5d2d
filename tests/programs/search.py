"""Draw the program of a number and run it; if it fails, shrink it."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

from hypothesis import HealthCheck, Phase, given, reject, seed, settings
from programs.chunks import chunk_differences
from programs.compare import Refused, differences
from programs.device import default_device
from programs.dispatch import OpenRegions, sound_dispatch
from programs.program import Case
from programs.reduce import reduce
from programs.render import script
from programs.restarts import restart_differences
from programs.strategy import Focus, cases
from programs.ways import run_compiled_by_torch


class Mismatch(AssertionError):
    """fxamp does otherwise than eager autocast; the message says what, and is a program to run."""


class Shrink(Enum):
    """What is done with a program that fails: nothing, statements dropped, or numbers shrunk by hypothesis before."""

    NO = "no"
    DROP = "drop"
    ALL = "all"


@dataclass
class Tally:
    """What was run: programs that were compared, and those that were refused, by reason.

    ``kinds`` and ``settings`` count the statements and settings of both. ``failures`` counts by the shrunk
    program that stands for them; ``numbers`` are those of all that failed. ``seconds``: of a processor.
    """

    programs: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    settings: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    numbers: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, other: "Tally") -> None:
        self.programs += other.programs
        self.kinds += other.kinds
        self.settings += other.settings
        self.refused += other.refused
        self.failures += other.failures
        self.numbers += other.numbers
        self.seconds += other.seconds


_ALL = Focus()


def search(numbers: Iterable[int], focus: Focus = _ALL, shrink: Shrink = Shrink.ALL) -> Tally:
    """Run the programs of these numbers. A number is one program of each ``focus``."""
    tally = Tally()
    for number in numbers:
        tally.add(_one(number, focus, shrink))
    return tally


@sound_dispatch()
def _one(number: int, focus: Focus, shrink: Shrink) -> Tally:
    tally, case = Tally(programs=1), draw(number, focus)
    tally.kinds.update(case.program.kinds())
    tally.settings.update([*case.setting.words(), case.program.border])
    try:
        check(case)
    except Refused as reason:
        tally.programs = 0
        tally.refused[str(reason).splitlines()[0][:100]] += 1
    except Mismatch as mismatch:
        shrunk = _shrunk(number, focus, case) if shrink is Shrink.ALL else case
        smaller = shrunk if shrink is Shrink.NO else reduce(shrunk, _fails)
        tally.failures[str(mismatch) if smaller is case else _message(smaller)] += 1
        tally.numbers.append(number)
    return tally


@sound_dispatch()
def run_without_fxamp(number: int, focus: Focus = _ALL) -> None:
    """Run the program of that number through torch.compile alone, in float32 and under autocast."""
    case = draw(number, focus)
    with warnings.catch_warnings(action="ignore"), default_device():
        for ambient in (False, True):
            with suppress(Exception):
                run_compiled_by_torch(case.program, case.setting, ambient)


@sound_dispatch()
def draw(number: int, focus: Focus = _ALL) -> Case:
    """The program of that number."""
    drawn: list[Case] = []

    def take(case: Case) -> None:
        drawn.append(case)
        if len(drawn) == 1:
            reject()  # hypothesis begins with the simplest program, whatever the seed

    _generate(number, focus, take, Phase.generate)
    return drawn[-1]


def _shrunk(number: int, focus: Focus, case: Case) -> Case:
    """What hypothesis makes of ``case``, which fails and has that number."""
    failing = [case]
    calls = 0

    def run(smaller: Case) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            reject()
        if _fails(smaller):
            failing.append(smaller)
            raise Mismatch

    with suppress(Mismatch):
        _generate(number, focus, run, Phase.generate, Phase.shrink)
    return failing[-1]


def _generate(number: int, focus: Focus, run: Callable[[Case], None], *phases: Phase) -> None:
    quiet = settings(
        max_examples=1,
        phases=phases,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    with warnings.catch_warnings(action="ignore"):  # one that torch raises once would change what is drawn
        seed(number)(quiet(given(cases(focus))(run)))()


def check(case: Case) -> None:
    """Raise Mismatch, with the program, if fxamp does otherwise than eager autocast."""
    message = _message(case)
    if message:
        raise Mismatch(message)


def _message(case: Case) -> str:
    setting = case.setting
    compare = chunk_differences if setting.chunks else restart_differences if setting.compiled else differences
    with warnings.catch_warnings(action="ignore"), default_device():
        try:
            messages = compare(case.program, setting)
        except OpenRegions as error:
            messages = [str(error)]
    return "\n".join([*messages, "", script(case)]) if messages else ""


def _fails(case: Case) -> bool:
    try:
        return bool(_message(case))
    except (Refused, SyntaxError, NameError):
        return False
