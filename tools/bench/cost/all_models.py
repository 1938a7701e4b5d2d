"""``fxamp-bench cost --every``: one table of all models, in both dtypes, under torch and under each kind of policy."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

from fxamp.dtypes import DTYPES
from fxamp.errors import OptionError
from fxamp.tools.bench.cost.count import Count
from fxamp.tools.bench.cost.rates import Rates
from fxamp.tools.bench.cost.row import row
from fxamp.tools.bench.cost.table import every, note
from fxamp.tools.bench.cost.workload import Plan, Way, Workload
from fxamp.tools.bench.report import Report

#: Layers or stages of each model.
LAYERS = 2


def plan_of_every(options: argparse.Namespace, rates: Rates) -> Plan:
    """All models. Raises OptionError for options that name one."""
    from fxamp.tools.bench.models import EVERY, require

    if options.file or options.model or options.policy:
        raise OptionError(
            "--every counts all models by all policies; accepted with it: --layers N, --optimizer, --clip"
        )
    for model in EVERY:
        require(model)
    layers = (options.layers or [LAYERS])[0]
    workloads = [
        _workload(model, layers, dtype, loss_only, options)
        for loss_only, dtype, model in product((False, True), DTYPES, EVERY)
    ]
    requests = [(workload, way) for workload in workloads for way in ways(workload.dtype)]

    def report(counts: Sequence[Count]) -> Report:
        rows = [row(way.label, way.policy, count) for (_, way), count in zip(requests, counts, strict=False)]
        number = len(ways(DTYPES[0]))
        parts = [(workload, rows[at * number : (at + 1) * number]) for at, workload in enumerate(workloads)]
        lines = [(work.model, work.dtype, "loss" if work.loss_only else "all", part) for work, part in parts if part]
        document: dict[str, Any] = {
            "version": 1,
            "rows": [
                {"workload": asdict(workload), **own.as_dict(rates)}
                for (workload, _), own in zip(requests, rows, strict=False)
            ],
        }
        texts = [f"{every(lines, rates, markdown)}\n\n{note(rates)}" for markdown in (False, True)]
        return Report(document, texts[0], texts[1])

    return Plan(requests, report)


def ways(dtype: str) -> list[Way]:
    """The ways of training that the table compares."""
    return [Way(), Way("auto"), Way(f"cuda-{dtype}"), Way(f"cuda-{dtype}-fast")]


def _workload(model: str, layers: int, dtype: str, loss_only: bool, options: argparse.Namespace) -> Workload:
    from fxamp.tools.bench.models import MODELS, depth_name

    sizes = dict(MODELS[model].sizes["full"])
    sizes[depth_name(sizes)] = layers
    return Workload(model, dtype, sizes, loss_only, options.scaler, options.optimizer, options.clip)
