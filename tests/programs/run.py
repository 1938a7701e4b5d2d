"""Run many random programs and print what was run and what failed: ``python -m programs.run`` in ``tests/``.

    python -m programs.run --programs 5000 --seed 0 --processes 2 [--shrink all] [--kinds linear cast]

Prints how many programs were compared, how often each kind of statement occurred, what autocast refused, and each
failure as a shrunk program that runs by itself. Exits with 1 if there are failures.
"""

import argparse
import logging
import sys
from functools import partial
from multiprocessing import get_context

import torch
from programs.search import Shrink, Tally, search
from programs.statements import STATEMENTS

#: Programs that a process runs before it reports.
_BATCH = 10


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="programs.run", description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=STATEMENTS, default=list(STATEMENTS))
    parser.add_argument("--without", nargs="+", choices=STATEMENTS, default=[])
    parser.add_argument("--shrink", type=Shrink, choices=Shrink, default=Shrink.DROP, metavar="no|drop|all")
    given = parser.parse_args(arguments)
    kinds = [kind for kind in given.kinds if kind not in given.without]
    work = partial(_batch, kinds=kinds, shrink=given.shrink)
    first = 1_000_000 * given.seed
    starts = range(first, first + given.programs, _BATCH)
    batches = [range(start, min(start + _BATCH, first + given.programs)) for start in starts]
    total = Tally()
    with get_context("spawn").Pool(given.processes, maxtasksperchild=20) as pool:
        for tally in pool.imap(work, batches):
            total.add(tally)
            for failure in tally.failures:
                print(f"{'=' * 100}\nprogram {tally.numbers}\n{failure}", flush=True)
    _print(total)
    return bool(total.failures)


def _batch(numbers: range, kinds: list[str], shrink: Shrink) -> Tally:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # torch would write a record of every graph
    return search(numbers, kinds, shrink)


def _print(total: Tally) -> None:
    print(f"{total.programs} programs compared, {total.refused.total()} refused by autocast, ", end="")
    print(f"{total.failures.total()} failures in {len(total.failures)} shrunk programs")
    for title, counted in (("statements", total.kinds), ("refused", total.refused)):
        print(f"\n{title}")
        for name, count in counted.most_common():
            print(f"{count:7} {name}")


if __name__ == "__main__":
    sys.exit(main())
