"""fxamp-bench show: how long does fxamp-show take for a dump, from the command line to the last line of text?"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from fxamp.capture import capture
from fxamp.errors import FxampError
from fxamp.listing import Entry, Listing
from fxamp.listing.write import write_listing
from fxamp.passes.base import CastContext
from fxamp.passes.sequences import FORWARD
from fxamp.pipeline import run_passes
from fxamp.pipeline.list_graph import list_graph
from fxamp.policy import Policy
from fxamp.tools.bench.passes.chain import build_chain
from fxamp.tools.bench.report import Report, add_styles
from fxamp.tools.common.command_line import Parser, guarded, one_of, positives
from fxamp.tools.common.interrupt import so_far
from fxamp.tools.common.output import put
from fxamp.tools.common.progress import bar, say
from fxamp.tools.show.command import FORMATS

PROG = "fxamp-bench show"
#: Each time is the median of this many runs.
RUNS = 3


@dataclass(frozen=True)
class Reading:
    """One dump and the time of ``fxamp-show FILE``: ``seconds`` elapsed and ``cpu`` seconds, each a median.

    ``ops`` is the requested number; ``nodes`` counts all nodes, including inputs, casts and output.
    """

    ops: int
    nodes: int
    bytes: int
    seconds: float
    cpu: float


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand; returns the exit status."""
    given = parser(PROG).parse_args(arguments)
    return guarded(PROG, lambda: put(run(given, say).text(given)))


def parser(prog: str) -> Parser:
    """The options of this command."""
    result = Parser(prog, "Time fxamp-show on dumps of growing size, each in a process of its own.")
    add = result.add_argument
    add("--sizes", type=positives, default=(1_000, 10_000, 50_000), help="ops in the dump (default 1000,10000,50000)")
    add("--format", type=one_of(*FORMATS), default="text", help=f"one of {', '.join(FORMATS)}; text unless given")
    add_styles(result)
    return result


def run(given: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Measure; ``say`` receives lines of progress. Raises FxampError if fxamp-show fails."""
    with tempfile.TemporaryDirectory(prefix="fxamp-bench-") as folder:
        start = time_show(smallest(), 1, Path(folder), given.format)
        readings: list[Reading] = []
        with (
            bar("dumps", len(given.sizes), "dump") as shown,
            so_far(lambda: table(start, readings) if readings else ""),
        ):
            for size in given.sizes:
                say(f"dump of {size} ops ...")
                readings.append(time_show(chain_listing(size), size, Path(folder), given.format))
                shown.update()
    return Report(document(start, readings), table(start, readings), table(start, readings, markdown=True))


def smallest() -> Listing:
    """Return a graph of one node; showing it takes little more than start-up time."""
    return Listing("GraphModule", (Entry("output", "output", "output", "(None,)"),), stage="cast")


def chain_listing(ops: int, policy: str = "cpu-bfloat16") -> Listing:
    """Return the listing of a chain of ``ops`` calls after the passes of ``policy``, as the backend dumps it."""
    chain = build_chain(ops)
    resolved = Policy.load(policy).resolve("cpu")
    captured = capture(chain.module, chain.inputs)
    run_passes(captured, CastContext(captured.mode, resolved), FORWARD)
    return list_graph(captured.module, stage="cast", policy=resolved.name, device="cpu")


def time_show(listing: Listing, ops: int, folder: Path, form: str) -> Reading:
    """Dump ``listing`` into ``folder`` and show it :data:`RUNS` times; raises FxampError if fxamp-show fails."""
    file = folder / f"graph_{ops}.py"
    file.write_text(write_listing(listing), encoding="utf-8")
    runs = [_run(file, form) for _ in range(RUNS)]
    seconds, cpu = (statistics.median(times) for times in zip(*runs, strict=True))
    return Reading(ops, sum(1 for _ in listing.walk()), file.stat().st_size, seconds, cpu)


def _run(file: Path, form: str) -> tuple[float, float]:
    """Elapsed and CPU seconds of one ``fxamp-show FILE``."""
    command = [sys.executable, "-c", "from fxamp.tools.show.command import main; raise SystemExit(main())"]
    before, start = _children(), time.perf_counter()
    done = subprocess.run(
        [*command, str(file), "--format", form], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    elapsed = time.perf_counter() - start
    if done.returncode != 0:
        raise FxampError(f"fxamp-show --format {form} ended with status {done.returncode}: {done.stderr.strip()}")
    return elapsed, _children() - before


def _children() -> float:
    """CPU seconds of all processes that this one started and that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def per_node(reading: Reading, start: Reading) -> float:
    """Return the elapsed seconds per node without the start-up time, which is that of the one-node dump ``start``."""
    return max(0.0, reading.seconds - start.seconds) / reading.nodes


def document(start: Reading, readings: Sequence[Reading]) -> dict[str, Any]:
    """Return the measurements as values for JSON; times in seconds."""
    return {
        "runs": RUNS,
        "start": asdict(start),
        "dumps": [asdict(reading) | {"per_node": per_node(reading, start)} for reading in readings],
    }


def table(start: Reading, readings: Sequence[Reading], markdown: bool = False) -> str:
    """Return the measurements as a table, the one-node dump first."""
    rows = [
        (
            reading.ops,
            reading.nodes,
            f"{reading.bytes / 1e6:.2f} MB",
            f"{reading.seconds:.2f} s",
            f"{reading.cpu:.2f} s",
            "" if reading is start else f"{1e6 * per_node(reading, start):.0f} us",
        )
        for reading in (start, *readings)
    ]
    headers = ("ops", "nodes", "dump", f"time, median of {RUNS}", "CPU time", "per node beyond start-up")
    return tabulate(rows, headers, tablefmt="github" if markdown else "simple", disable_numparse=True)
