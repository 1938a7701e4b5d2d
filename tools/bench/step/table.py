"""The measurements as a table, for a terminal or as Markdown."""

import math
from collections.abc import Mapping, Sequence

from tabulate import tabulate

from fxamp.tools.bench.spread import spread
from fxamp.tools.bench.step.contenders import CONTENDERS
from fxamp.tools.bench.step.measure import Measured
from fxamp.tools.bench.step.setup import Setup

Row = tuple[Setup, Measured]

HEADERS = ("parameters", "elements", "step by", "first compile", "its step's", "CPU time of both", "a step, ms")


def table(facts: Mapping[str, str], rows: Sequence[Row], markdown: bool = False) -> str:
    """Return title, table and notes."""
    drawn = tabulate(
        [_cells(*row) for row in rows],
        HEADERS,
        tablefmt="github" if markdown else "simple",
        disable_numparse=True,
    )
    versions = ", ".join(f"{name} {version}" for name, version in facts.items() if name != "device")
    notes = [
        "First compile: torch.compile of one addition with empty caches: imports, and tests of the C++ compiler.",
        "Its step's: what compiling AdamW's step takes after that. A step: median and quartiles of the rounds.",
        *(f"{each.name} failed: {each.failed}" for _, each in rows if each.failed),
    ]
    lines = "\n".join(f"- {note}" if markdown else note for note in notes)
    return "\n\n".join([f"AdamW's step on {facts['device']}; {versions}", drawn, lines])


def _cells(setup: Setup, each: Measured) -> tuple[str, ...]:
    elements = sum(map(math.prod, setup.shapes()))
    start = (str(setup.parameters), f"{elements / 1e6:.1f} M", CONTENDERS[each.name].label)
    if each.failed:
        return (*start, "failed", "", "", "")
    both = f"{_seconds(each.first_cpu)} + {_seconds(each.compiling_cpu)}"
    times = spread([1e3 * seconds for seconds in each.steps])
    step = f"{times.median:.1f} [{times.low:.1f}, {times.high:.1f}]"
    return (*start, _seconds(each.first), _seconds(each.compiling), "-" if both == "- + -" else both, step)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
