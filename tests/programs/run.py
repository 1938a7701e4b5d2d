"""Run many random programs and print what was run and what failed: ``python -m programs.run`` in ``tests/``.

    python -m programs.run --programs 10000 --seed 0 --processes 2 [--shrink all] [--kinds linear cast] [--minutes 30]
                                           [--device cuda]

Prints each failure, as a shrunk program that runs by itself, when it is found; at the end how many programs were
compared, how many a minute and how long each took, how often each kind of statement and each setting occurred, and
what was refused; so it does when it is interrupted. A program that kills its process or takes longer than ten minutes
is a failure too, and what its threads were at is printed. Exits with 1 if there are failures.
"""

import argparse
import faulthandler
import logging
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import torch
import torch._dynamo.guards
from programs.device import running_on
from programs.search import Shrink, Tally, run_without_fxamp, search
from programs.statements import STATEMENTS
from programs.strategy import Focus
from programs.workers import LIMIT, Task, run_all


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="programs.run", description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no program after this many")
    parser.add_argument("--kinds", nargs="+", choices=STATEMENTS, default=list(STATEMENTS), metavar="KIND")
    parser.add_argument("--without", nargs="+", choices=STATEMENTS, default=[], metavar="KIND")
    parser.add_argument("--settings", nargs="+", default=[], help="words of the table of settings: no others are drawn")
    parser.add_argument("--longest", type=int, default=Focus.longest, help="statements of a program")
    parser.add_argument("--shrink", type=Shrink, choices=Shrink, default=Shrink.DROP, metavar="no|drop|all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(arguments)
    kinds = tuple(kind for kind in options.kinds if kind not in options.without)
    focus = Focus(kinds, tuple(options.settings), options.longest)
    start, first = time.monotonic(), 1_000_000 * options.seed
    tasks = [Task(number, focus, options.shrink, options.device) for number in range(first, first + options.programs)]
    total, counts = Tally(), Counter[str]()
    with suppress(KeyboardInterrupt):
        for task, tally in run_all(_one, _alone, tasks, options.processes, start + 60 * options.minutes):
            total.add(tally)
            for failure in tally.failures:
                print(f"{'=' * 100}\nprogram {task.number}\n{failure}", flush=True)
                counts.update([failure.splitlines()[0][:100]])
    _print(total, counts, (time.monotonic() - start) / 60)
    return bool(total.failures)


def _one(task: Task) -> Tally:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # torch would write a record of every graph
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # it flushes the processor's cache
    faulthandler.dump_traceback_later(LIMIT - 10)  # what each thread of a program that hangs is at
    start = time.process_time()
    with running_on(task.device):
        tally = search([task.number], task.focus, task.shrink)
    faulthandler.cancel_dump_traceback_later()
    return replace(tally, seconds=time.process_time() - start)


def _alone(task: Task) -> None:
    torch.set_num_threads(1)
    with running_on(task.device):
        run_without_fxamp(task.number, task.focus)


def _print(total: Tally, counts: Counter[str], minutes: float) -> None:
    ran = total.programs + total.refused.total()
    print(f"{ran} programs in {minutes:.1f} minutes, {ran / minutes:.0f} a minute: {total.programs} compared, ", end="")
    print(
        f"{total.refused.total()} refused, {total.failures.total()} failures in {len(total.failures)} shrunk programs"
    )
    print(f"{total.seconds / max(1, ran):.2f} seconds of a processor for each")
    tables = {"failures": counts, "statements": total.kinds, "settings": total.settings, "refused": total.refused}
    for title, counted in tables.items():
        print(f"\n{title}")
        for name, count in counted.most_common():
            print(f"{count:7} {name}")


if __name__ == "__main__":
    sys.exit(main())
