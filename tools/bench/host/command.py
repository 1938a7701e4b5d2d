"""fxamp-bench host: what does a step of fxamp cost the host, compared with torch's?"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from fxamp.tools.bench.host.steps import KINDS, Row, calls, start, timed
from fxamp.tools.bench.process import Process
from fxamp.tools.bench.report import Report, add_styles, drawn, spread
from fxamp.tools.common.command_line import Parser, one_of, positive
from fxamp.tools.common.machine import QUIET, load, machine
from fxamp.tools.common.progress import bar

#: Parameters of the trained model; the optimizer alone has more, as a step is all that it does.
SIZES, OPTIMIZER = (8, 32, 96), 150

_HEADERS = ("step", "parameters", "torch, us", "fxamp, us", "ratio", "calls: torch", "fxamp", "ratio")


def parser(prog: str) -> Parser:
    """The options of this command."""
    result = Parser(prog, "Compare the CPU time that a step of tiny layers takes on the host with torch's.")
    result.add_argument(
        "--only", type=one_of(*KINDS), action="append", metavar="KIND", help=f"one of: {', '.join(KINDS)}; repeatable"
    )
    result.add_argument("--rounds", type=positive, default=10, help="number of rounds; each gives one ratio (10)")
    result.add_argument("--steps", type=positive, default=30, help="steps of each contender in a round (30)")
    result.add_argument("--parameters", type=positive, help="parameters of each row, instead of the usual numbers")
    result.add_argument(
        "--lowering", type=one_of("inductor", "aot_eager"), default="inductor", help="lowering (inductor)"
    )
    add_styles(result)
    return result


def run(options: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Measure each row in a process of its own; ``say`` receives lines of progress."""
    before, rows = load(), []
    for row in _rows(options):
        say(f"{row.kind}, {row.parameters} parameters")
        rows.append(_measured(row, options))
    document = {"machine": machine("cpu", 1), "load": before, "rounds": options.rounds, "rows": rows}
    return Report(document, _table(document), _table(document, markdown=True))


def _rows(options: argparse.Namespace) -> list[Row]:
    return [
        Row(kind, count, options.lowering)
        for kind in (options.only or KINDS)
        for count in ((options.parameters,) if options.parameters else _usual(kind))
    ]


def _usual(kind: str) -> Sequence[int]:
    return (OPTIMIZER,) if kind == "compiled optimizer" else SIZES


def _measured(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    with Process(start, row) as process, bar(row.kind, options.rounds, "round") as shown:
        rounds = []
        for number in range(options.rounds):
            rounds.append(process.ask(timed, options.steps, number))
            shown.update()
        return {"step": row.kind, "parameters": row.parameters, "us": rounds, "calls": process.ask(calls)}


def _table(document: dict[str, Any], markdown: bool = False) -> str:
    cells = []
    for row in document["rows"]:
        ratio = spread([found["fxamp"] / found["torch"] for found in row["us"]])
        times = [f"{spread([found[who] for found in row['us']]).median:.0f}" for who in ("torch", "fxamp")]
        counted = row["calls"]
        share = f"{counted['fxamp'] / counted['torch']:.2f}"
        cells.append((row["step"], row["parameters"], *times, str(ratio), counted["torch"], counted["fxamp"], share))
    notes = [f"CPU time of one thread; ratios: median and quartiles of {document['rounds']} rounds. {_facts(document)}"]
    if document["load"] > QUIET:
        notes.append(
            f"The machine was busy: its load was {document['load']:.1f} before the first row. Other work uses the "
            "caches, so the ratios are less certain."
        )
    return "\n\n".join([drawn(cells, _HEADERS, markdown), "\n".join(notes)])


def _facts(document: dict[str, Any]) -> str:
    facts = document["machine"]
    return f"{facts['device']}, torch {facts['torch']}, Python {facts['python']}."
