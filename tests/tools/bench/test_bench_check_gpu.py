"""All that ``fxamp-bench check`` checks on a GPU, one by one and in this process."""

import pytest
from support.machines.lacks import needs_gpu

from fxamp.tools.bench.check.check_line import OK, SKIPPED
from fxamp.tools.bench.check.checks import checks, run_check

CHECKS = checks("cuda", "inductor")


@pytest.mark.gpu
@pytest.mark.inductor
@needs_gpu
@pytest.mark.filterwarnings("default")  # as in the command, where torch's warnings are none of the answer
@pytest.mark.parametrize("at", range(len(CHECKS)), ids=[check.name.replace(" ", "_") for check in CHECKS])
def test_a_check_of_the_command(at: int) -> None:
    outcome = run_check(CHECKS, at)
    if outcome.status == SKIPPED:
        pytest.skip(outcome.detail)
    assert outcome.status == OK, outcome.detail
