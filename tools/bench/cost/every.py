"""``fxamp-bench cost --every``: one table of all models, in both dtypes, under torch and under each kind of policy."""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any

from fxamp.dtypes import DTYPES
from fxamp.errors import OptionError
from fxamp.tools.bench.cost.count import Count
from fxamp.tools.bench.cost.row import Rates, Row, row
from fxamp.tools.bench.cost.table import every, note
from fxamp.tools.bench.cost.workload import Way, Workload
from fxamp.tools.bench.report import Report
from fxamp.tools.common.interrupt import so_far
from fxamp.tools.common.progress import bar

#: The models of the table, at so many layers or stages.
EVERY = ("gpt2-124m", "bert-base", "llama-1b", "vit-b", "resnet50")
LAYERS = 2

#: Counts one request after another, as :func:`fxamp.tools.bench.cost.process.counts` does.
Counts = Callable[[Iterable[tuple[Workload, Way]]], Iterator[Count]]


def run_every(given: argparse.Namespace, rates: Rates, counts: Counts, say: Callable[[str], None]) -> Report:
    """Count all models. Raises OptionError for options that name one."""
    from fxamp.tools.bench.train.models import require

    if given.file or given.model or given.policy:
        raise OptionError(
            "--every counts all models by all policies; accepted beside it: --layers N, --optimizer, --clip"
        )
    for model in EVERY:
        require(model)
    layers = (given.layers or [LAYERS])[0]
    workloads = [
        _workload(model, layers, dtype, loss_only, given)
        for loss_only, dtype, model in product((False, True), DTYPES, EVERY)
    ]
    requests = [(workload, way) for workload in workloads for way in ways(workload.dtype)]
    rows: list[Row] = []

    def drawn(markdown: bool) -> str:
        each = len(ways(DTYPES[0]))
        parts = [(workload, rows[at * each : (at + 1) * each]) for at, workload in enumerate(workloads)]
        lines = [(work.model, work.dtype, _leaving(work), part) for work, part in parts if part]
        return every(lines, rates, markdown)

    with bar("counted", len(requests), "way") as shown, so_far(lambda: drawn(False) if rows else ""):
        for (_, way), count in zip(requests, counts(_said(requests, say)), strict=True):
            rows.append(row(way.label, way.policy, count))
            shown.update()
    found = zip(requests, rows, strict=True)
    document: dict[str, Any] = {
        "version": 1,
        "rows": [{"workload": workload.as_dict(), **each.as_dict(rates)} for (workload, _), each in found],
    }
    return Report(document, f"{drawn(False)}\n\n{note(rates)}", f"{drawn(True)}\n\n{note(rates)}")


def ways(dtype: str) -> list[Way]:
    """The ways of training that the table compares."""
    return [Way(), Way("auto"), Way(f"cuda-{dtype}"), Way(f"cuda-{dtype}-fast")]


def _workload(model: str, layers: int, dtype: str, loss_only: bool, given: argparse.Namespace) -> Workload:
    from fxamp.tools.bench.train.models import MODELS

    sizes = dict(MODELS[model].sizes["full"])
    sizes["depth" if "depth" in sizes else "layers"] = layers
    return Workload(model, dtype, sizes, loss_only, given.scaler, given.optimizer, given.clip)


def _said(requests: Sequence[tuple[Workload, Way]], say: Callable[[str], None]) -> Iterator[tuple[Workload, Way]]:
    for workload, way in requests:
        say(f"{way.label}, {workload.model}, {workload.dtype}, {_leaving(workload)} leaves ...")
        yield workload, way


def _leaving(workload: Workload) -> str:
    return "loss" if workload.loss_only else "all"
