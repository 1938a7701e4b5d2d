"""fxamp-bench passes: does the time of each pass grow linearly, and what is their share of a compile?"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from tabulate import tabulate

from fxamp.tools.bench.passes.growth import Timing, growth, time_chain
from fxamp.tools.bench.passes.share import Share, time_compile
from fxamp.tools.bench.report import Report, add_styles
from fxamp.tools.common.command_line import Parser, guarded, natural, positives
from fxamp.tools.common.interrupt import so_far
from fxamp.tools.common.output import put
from fxamp.tools.common.progress import bar, say

PROG = "fxamp-bench passes"


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand; returns the exit status."""
    given = parser(PROG).parse_args(arguments)
    return guarded(PROG, lambda: put(run(given, say).text(given)))


def parser(prog: str) -> Parser:
    """The options of this command."""
    result = Parser(prog, "Time capture and passes: by number of ops, and as a share of a torch.compile.")
    add = result.add_argument
    add("--sizes", type=positives, default=(1_000, 10_000, 50_000), help="ops in the chain (default 1000,10000,50000)")
    add("--model-layers", type=natural, default=12, help="layers of the GPT-2 that is compiled; 0: none (default 12)")
    add_styles(result)
    return result


def run(given: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Measure; ``say`` receives lines of progress."""
    timings: list[Timing] = []
    time_chain(min(100, *given.sizes))  # imports and caches of torch, once and for all sizes
    with bar("chains", len(given.sizes), "chain") as shown, so_far(lambda: _tables(timings, None) if timings else ""):
        for size in given.sizes:
            say(f"chain of {size} ops ...")
            timings.append(time_chain(size))
            shown.update()
    share = None
    if given.model_layers:
        say(f"torch.compile of GPT-2, {given.model_layers} layers, without caches ...")
        with so_far(lambda: _tables(timings, None)):
            share = time_compile(given.model_layers)
    return Report(_document(timings, share), _tables(timings, share), _tables(timings, share, markdown=True))


def _document(timings: list[Timing], share: Share | None) -> dict[str, Any]:
    return {
        "chains": [asdict(timing) for timing in timings],
        "growth": growth(timings),
        "compile": None if share is None else asdict(share) | {"own_share": share.own_share},
    }


def _tables(timings: list[Timing], share: Share | None, markdown: bool = False) -> str:
    sizes = [timing.ops for timing in timings]
    ratios = growth(timings)
    rows = [
        (name, *(f"{t.seconds[name]:.3f} s  {1e6 * t.per_op(name):.0f} us/op" for t in timings), f"{ratios[name]:.2f}")
        for name in timings[0].seconds
    ]
    headers = ("CPU time", *(f"{size} ops" for size in sizes), f"us/op, {sizes[-1]} to {sizes[0]}")
    text = tabulate(rows, headers, tablefmt="github" if markdown else "simple", disable_numparse=True)
    return text if share is None else f"{text}\n\n{_share_table(share, markdown)}"


def _share_table(share: Share, markdown: bool = False) -> str:
    rows = [
        ("whole torch.compile", share.total),
        ("  fxamp", share.own),
        ("    capture", share.capture),
        ("    passes", share.passes),
        ("  lowering in the backend call (Inductor)", share.lowering),
    ]
    cells = [(name, f"{seconds:.2f} s", f"{seconds / share.total:.2%}") for name, seconds in rows]
    title = f"GPT-2, {share.layers} layers: {share.ops} ops and {share.casts} casts in {share.graphs} graphs"
    return tabulate(cells, (title, "time", "share"), tablefmt="github" if markdown else "simple", disable_numparse=True)
