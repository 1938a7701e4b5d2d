"""Draw cases and run them until one fails; hypothesis shrinks it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, given, seed, settings
from programs.compare import Refused, differences
from programs.program import Case
from programs.render import script
from programs.strategy import cases


class Mismatch(AssertionError):
    """fxamp does otherwise than eager autocast; the message is a program to run."""


@dataclass
class Tally:
    """What was run: ``programs`` that were compared, by kind of their statements, and those that autocast refused.

    ``failures`` counts by the shrunk program that stands for them.
    """

    programs: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Tally") -> None:
        self.programs += other.programs
        self.kinds += other.kinds
        self.refused += other.refused
        self.failures += other.failures


def search(count: int, number: int, kinds: Sequence[str] = (), shrink: bool = True) -> Tally:
    """Run up to ``count`` cases from seed ``number``, and stop at the first failure, shrunk unless told otherwise."""
    tally, failed = Tally(), ""

    def run(case: Case) -> None:
        nonlocal failed
        try:
            check(case)
        except Refused as reason:
            tally.refused[str(reason).splitlines()[0][:100]] += not failed
            return
        except Mismatch as mismatch:
            tally.programs += not failed
            failed = str(mismatch)
            raise
        if not failed:
            tally.programs += 1
            tally.kinds.update(case.program.kinds())

    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    quiet = settings(max_examples=count, phases=phases, database=None, deadline=None, report_multiple_bugs=False,
                     suppress_health_check=list(HealthCheck), print_blob=False)  # fmt: skip
    try:
        seed(number)(quiet(given(cases(kinds))(run)))()
    except Mismatch:
        tally.failures[failed] += 1
    return tally


def check(case: Case) -> None:
    """Raise Mismatch, with the program, if fxamp does otherwise than eager autocast."""
    found = differences(case.program, case.setting)
    if found:
        raise Mismatch("\n".join([*found, "", script(case)]))
