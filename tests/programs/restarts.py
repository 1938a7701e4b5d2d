"""A restart in the middle of a training whose optimizer is compiled, compared with the same training without one.

A compiled step rounds otherwise than the optimizer's own, so eager autocast is no oracle here.
"""

from collections.abc import Iterator
from dataclasses import replace

from programs.compare import Refused, differences, found_in, oracle
from programs.outcome_differences import compared
from programs.program import Program, Setting
from programs.ways import run_compiled, run_eager


def restart_differences(program: Program, setting: Setting) -> list[str]:
    """What the restart changes, bit for bit.

    Raises Refused where eager autocast raises, and where a restart with the optimizer's own step differs too.
    """
    oracle(run_eager, program, setting)
    messages = found_in(lambda: _compared(program, setting))
    if messages and differences(program, replace(setting, compiled="")):
        raise Refused(f"with the optimizer's own step: {messages[0]}")
    return messages


def _compared(program: Program, setting: Setting) -> Iterator[str]:
    whole = run_compiled(program, replace(setting, schedule="train"))
    return compared(run_compiled(program, setting), whole, whole, setting)
