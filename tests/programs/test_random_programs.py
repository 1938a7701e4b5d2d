"""Random programs run through fxamp as they do under eager autocast, bit for bit."""

from hypothesis import HealthCheck, assume, given, settings
from programs.compare import Refused
from programs.program import Case
from programs.search import check
from programs.statements import STATEMENTS
from programs.strategy import cases

#: Kinds that main is known to get wrong.
SWITCHED_OFF = frozenset({"cast", "cast_like"})
SOUND = tuple(name for name in STATEMENTS if name not in SWITCHED_OFF)


@settings(max_examples=60, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(SOUND))
def test_a_random_program_runs_as_under_autocast(case: Case) -> None:
    try:
        check(case)
    except Refused:
        assume(False)
