"""Random programs run through fxamp as they do under eager autocast, bit for bit."""

import pytest
from programs.search import Shrink, search
from programs.statements import STATEMENTS
from programs.strategy import Focus
from support.checks.exhaustive import exhaustive

#: Kinds that are known to go wrong.
SWITCHED_OFF: frozenset[str] = frozenset()
SOUND = tuple(name for name in STATEMENTS if name not in SWITCHED_OFF)


@pytest.mark.parametrize("start", exhaustive(range(100, 148, 6), always=[100]))
def test_random_programs_run_as_under_autocast(start: int) -> None:
    tally = search(range(start, start + 6), Focus(SOUND), Shrink.NO)
    assert not tally.failures, "\n".join([f"search({tally.numbers}) shrinks them", *tally.failures])
    assert tally.programs >= 2, tally.refused
