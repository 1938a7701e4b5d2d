"""fxamp-bench cost: bytes, launches, FLOPs and saved bytes of a training step on a GPU, which may be absent."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fxamp.errors import OptionError
from fxamp.policy import Policy
from fxamp.tools.bench.cost import table
from fxamp.tools.bench.cost.all_models import plan_of_every
from fxamp.tools.bench.cost.count import Count
from fxamp.tools.bench.cost.process import counts
from fxamp.tools.bench.cost.rates import Rates
from fxamp.tools.bench.cost.row import Row, extrapolated, row
from fxamp.tools.bench.cost.workload import DTYPES, OPTIMIZERS, Plan, Way, Workload
from fxamp.tools.bench.report import Report, add_styles
from fxamp.tools.common.command_line import Parser, natural, one_of, positive, positive_number
from fxamp.tools.common.interrupt import so_far
from fxamp.tools.common.progress import bar
from fxamp.tools.inputs.kinds import existing

_DEFAULT_MODEL = "gpt2-124m"
_DEFAULT_LAYERS = 2


def parser(prog: str) -> Parser:
    """The options of this command."""
    from fxamp.tools.bench.models import MODELS

    result = Parser(prog, "Count what a training step moves on a GPU, from the kernels that Inductor generates for it.")
    add, usual = result.add_argument, Rates()
    add("file", nargs="?", metavar="MODEL.py", help="a file that defines model and inputs, as fxamp-show reads it")
    add(
        "--model",
        type=one_of(*MODELS),
        help=f"one of these, in full size: {', '.join(MODELS)} (default {_DEFAULT_MODEL})",
    )
    add("--every", action="store_true", help="one table of all large models, in both dtypes, by each kind of policy")
    add(
        "--layers",
        type=positive,
        nargs="+",
        metavar="N",
        help="layers, or stages, to count; several numbers extrapolate",
    )
    add(
        "--policy",
        action="append",
        metavar="P",
        help='a name, a file, or "auto"; may be repeated (default: auto and the dtype\'s own)',
    )
    add(
        "--dtype",
        type=one_of(*DTYPES),
        default="float16",
        help=f"dtype of the ambient autocast: {', '.join(DTYPES)} (float16)",
    )
    add("--scaler", action="store_true", help="scale the loss; always on in float16")
    add(
        "--optimizer",
        type=one_of(*OPTIMIZERS),
        default="AdamW",
        help=f"{', '.join(OPTIMIZERS)}, in torch's fused form (AdamW)",
    )
    add("--clip", action="store_true", help="clip the gradients to a norm")
    add("--loss-only", action="store_true", help="the compiled graph returns the loss alone")
    add("--kernels", type=natural, default=0, metavar="N", help="list the N heaviest kernels of each row")
    add(
        "--kept",
        type=natural,
        default=0,
        metavar="N",
        help="list the N largest tensors that each row keeps for the backward",
    )
    add("--peak", type=natural, default=0, metavar="N", help="list the N largest buffers in use at each peak, and when")
    add(
        "--bandwidth",
        type=positive_number,
        default=usual.bandwidth / 1e9,
        help="bandwidth of the GPU's memory, GB/s (%(default)g)",
    )
    add(
        "--tflops",
        type=positive_number,
        default=usual.flops16 / 1e12,
        help="rate of products in 16 bits; float32 takes a twelfth of it (%(default)g)",
    )
    add(
        "--pcie",
        type=positive_number,
        default=usual.host / 1e9,
        help="bandwidth to host memory, GB/s each way (%(default)g)",
    )
    add_styles(result)
    return result


def run(options: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Count every way of training. Raises FxampError for a user's mistake, or if this machine cannot count."""
    rates = Rates(1e9 * options.bandwidth, 1e12 * options.tflops, 1e12 * options.tflops / 12, 1e9 * options.pcie)
    plan = plan_of_every(options, rates) if options.every else _plan(options, rates)
    results: list[Count] = []

    def announced() -> Iterator[tuple[Workload, Way]]:
        for workload, way in plan.requests:
            say(f"{way.label}, {_title(workload)} ...")
            yield workload, way

    with (
        bar("counted", len(plan.requests), "way") as shown,
        so_far(lambda: plan.report(results).table if results else ""),
    ):
        for count in counts(announced()):
            results.append(count)
            shown.update()
    return plan.report(results)


@dataclass(frozen=True)
class _Table:
    """Rows for a model with this number of layers."""

    title: str
    layers: int
    rows: Sequence[Row]


def _plan(options: argparse.Namespace, rates: Rates) -> Plan:
    """One model, of each number of layers, in every way."""
    from fxamp.tools.bench.models import depth_name

    workload, full = _workload(options)
    usual = [] if options.dtype == "float32" else ["auto", f"cuda-{options.dtype}"]
    ways = [Way(), *map(Way, options.policy or usual)]
    for way in ways[1:]:
        if way.policy != "auto":
            Policy.load(way.policy)
    depth = depth_name(workload.sizes)
    layers = options.layers or ([min(_DEFAULT_LAYERS, full)] if depth else [0])
    workloads = [replace(workload, sizes={**workload.sizes, depth: n}) if depth else workload for n in layers]

    def report(counted: Sequence[Count]) -> Report:
        groups = [counted[at : at + len(ways)] for at in range(0, len(counted), len(ways))]
        tables = []
        for sized, number, group in zip(workloads, layers, groups, strict=False):
            rows = [row(way.label, way.policy, count) for way, count in zip(ways, group, strict=False)]
            tables.append(_Table(_title(sized), number, rows))
        if len(set(layers)) > 1 and depth == "layers" and len(counted) == len(workloads) * len(ways):
            rows = [extrapolated(layers, [part.rows[at] for part in tables], full) for at in range(len(ways))]
            tables.append(_Table(f"{workload.model}, extrapolated to {full} layers", full, rows))
        lists = [
            text
            for sized, group in zip(workloads, groups, strict=False)
            for way, count in zip(ways, group, strict=False)
            for text in _lists(options, f"{way.label}, {_title(sized)}", count)
        ]
        peaks = [
            {"way": way.label, "title": _title(sized), **asdict(count.peak.largest(options.peak))}
            for sized, group in zip(workloads, groups, strict=False)
            for way, count in zip(ways, group, strict=False)
            if options.peak
        ]
        return _report(workload, rates, lists, tables, peaks, options.markdown)

    return Plan([(sized, way) for sized in workloads for way in ways], report)


def _report(
    workload: Workload,
    rates: Rates,
    lists: Sequence[str],
    tables: Sequence[_Table],
    peaks: Sequence[Mapping[str, Any]],
    markdown: bool,
) -> Report:
    document: dict[str, Any] = {
        "version": 1,
        "workload": asdict(workload),
        "rates": asdict(rates),
        "tables": [
            {"title": part.title, "layers": part.layers, "rows": [row.as_dict(rates) for row in part.rows]}
            for part in tables
        ],
        **({"peaks": peaks} if peaks else {}),
    }
    texts = [f"{part.title}\n\n{table.ways(part.rows, rates, markdown)}" for part in tables]
    text = "\n\n".join([*texts, *lists, table.note(rates)])
    return Report(document, text, text)


def _lists(options: argparse.Namespace, title: str, count: Count) -> list[str]:
    """The heaviest kernels, the largest saved tensors and the peak, as far as the options ask for them."""
    texts = []
    if options.kernels:
        texts.append(f"{title}: the heaviest kernels\n\n{table.heaviest(count, options.kernels, options.markdown)}")
    if options.kept:
        texts.append(f"{title}: kept for the backward\n\n{table.kept(count, options.kept, options.markdown)}")
    if options.peak:
        texts.append(f"{title}: the peak, {table.peak(count, options.peak, options.markdown)}")
    return texts


def _workload(options: argparse.Namespace) -> tuple[Workload, int]:
    """The workload, and how many layers the model has in its full size."""
    common = {name: getattr(options, name) for name in ("dtype", "scaler", "optimizer", "clip", "loss_only")}
    if options.file is None:
        from fxamp.tools.bench.models import MODELS, require

        name = options.model or _DEFAULT_MODEL
        require(name)
        sizes = dict(MODELS[name].sizes["full"])
        return Workload(name, sizes=sizes, **common), sizes.get("layers", sizes.get("depth", 0))
    if options.model or options.layers:
        raise OptionError(
            f"{options.file} defines its own model; --model and --layers are for the models of fxamp-bench"
        )
    file = existing(options.file, "a Python file with model and inputs")
    return Workload(str(Path(file).resolve()), **common), 0


def _title(workload: Workload) -> str:
    sizes = ", ".join(f"{name} {size}" for name, size in workload.sizes.items())
    settings = [workload.dtype, f"{workload.optimizer}{' clipped' if workload.clip else ''}"]
    settings += ["only the loss leaves the graph"] if workload.loss_only else []
    name = workload.model if workload.sizes else Path(workload.model).name
    return f"{name}{f' ({sizes})' if sizes else ''}: {', '.join(settings)}"
