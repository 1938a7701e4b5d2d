"""fxamp-bench cost: bytes, launches, FLOPs and kept bytes of a training step on a GPU, which need not be there."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fxamp.errors import OptionError
from fxamp.policy import Policy
from fxamp.tools.bench.cost import table
from fxamp.tools.bench.cost.count import Count
from fxamp.tools.bench.cost.every import run_every
from fxamp.tools.bench.cost.process import counts
from fxamp.tools.bench.cost.row import Rates, Row, extrapolated, row
from fxamp.tools.bench.cost.workload import DTYPES, OPTIMIZERS, Way, Workload
from fxamp.tools.bench.report import Report, add_styles
from fxamp.tools.common.command_line import Parser, guarded, natural, one_of, positive, positive_number
from fxamp.tools.common.interrupt import so_far
from fxamp.tools.common.output import put
from fxamp.tools.common.progress import bar, say

PROG = "fxamp-bench cost"
_DEFAULT_MODEL = "gpt2-124m"
_DEFAULT_LAYERS = 2


@dataclass(frozen=True)
class _Table:
    """Rows for a model of so many layers."""

    title: str
    layers: int
    rows: Sequence[Row]


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand; returns the exit status."""
    given = parser(PROG).parse_args(arguments)
    return guarded(PROG, lambda: put(run(given, say).text(given)))


def parser(prog: str) -> Parser:
    """The options of this command."""
    from fxamp.tools.bench.train.models import MODELS

    result = Parser(prog, "Count what a training step moves on a GPU, from the kernels that Inductor generates for it.")
    add = result.add_argument
    add("file", nargs="?", metavar="MODEL.py", help="a file that defines model and inputs, as fxamp-show reads it")
    add("--model", type=one_of(*MODELS), help=f"in its full size: {', '.join(MODELS)} (default {_DEFAULT_MODEL})")
    add("--every", action="store_true", help="one table of all large models, in both dtypes, by each kind of policy")
    add("--layers", type=positive, nargs="+", metavar="N", help="so many layers, or stages; two or more extrapolate")
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
        help=f"of the ambient autocast: {', '.join(DTYPES)} (float16)",
    )
    add("--scaler", action="store_true", help="scale the loss; float16 always does")
    add(
        "--optimizer",
        type=one_of(*OPTIMIZERS),
        default="AdamW",
        help=f"{', '.join(OPTIMIZERS)}, in torch's fused form (AdamW)",
    )
    add("--clip", action="store_true", help="gradients are clipped to a norm")
    add("--loss-only", action="store_true", help="nothing but the loss leaves the compiled graph")
    add("--kernels", type=natural, default=0, metavar="N", help="list the N heaviest kernels of each")
    add(
        "--kept",
        type=natural,
        default=0,
        metavar="N",
        help="list the N largest tensors that each keeps for the backward",
    )
    add("--bandwidth", type=positive_number, default=3000.0, help="of the GPU's memory, GB/s (default 3000)")
    add(
        "--tflops",
        type=positive_number,
        default=600.0,
        help="of products in 16 bits; float32 at a twelfth (default 600)",
    )
    add_styles(result)
    return result


def run(given: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Count every way of training. Raises FxampError for a user's mistake, and where this machine cannot count."""
    rates = Rates(1e9 * given.bandwidth, 1e12 * given.tflops, 1e12 * given.tflops / 12)
    if given.every:
        return run_every(given, rates, counts, say)
    workload, full = _workload(given)
    ways = [Way(), *map(Way, given.policy or _policies(given.dtype))]
    for way in ways:
        if way.policy not in ("", "auto"):
            Policy.load(way.policy)
    depth = _depth(workload)
    layers = given.layers or ([min(_DEFAULT_LAYERS, full)] if depth else [0])
    workloads = [replace(workload, sizes={**workload.sizes, depth: each}) if depth else workload for each in layers]
    counted = _counted(workloads, ways, rates, say)
    groups = zip(workloads, layers, counted, strict=True)
    tables = [_Table(_title(sized), each, _rows(ways, group)) for sized, each, group in groups]
    if len(set(layers)) > 1 and depth == "layers":
        rows = [extrapolated(layers, [each.rows[at] for each in tables], full) for at in range(len(ways))]
        tables.append(_Table(f"{workload.model}, extrapolated to {full} layers", full, rows))
    texts = [f"{each.title}\n\n{table.ways(each.rows, rates, given.markdown)}" for each in tables]
    for sized, group in zip(workloads, counted, strict=True):
        for way, count in zip(ways, group, strict=True):
            texts += _lists(given, f"{way.label}, {_title(sized)}", count)
    return _report(workload, rates, texts, tables)


def _counted(
    workloads: Sequence[Workload], ways: Sequence[Way], rates: Rates, say: Callable[[str], None]
) -> list[list[Count]]:
    """Return the counts of each workload, way by way; Ctrl-C leaves a table of those that are there."""
    requests = [(workload, way) for workload in workloads for way in ways]
    made: list[Count] = []

    def tables() -> str:
        groups = [made[at : at + len(ways)] for at in range(0, len(made), len(ways))]
        found = zip(workloads, groups, strict=False)
        return "\n\n".join(
            f"{_title(workload)}\n\n{table.ways(_rows(ways, group), rates, False)}" for workload, group in found
        )

    with bar("counted", len(requests), "way") as shown, so_far(tables):
        for count in counts(_said(requests, say)):
            made.append(count)
            shown.update()
    return [made[at : at + len(ways)] for at in range(0, len(made), len(ways))]


def _rows(ways: Sequence[Way], group: Sequence[Count]) -> list[Row]:
    return [row(way.label, way.policy, count) for way, count in zip(ways, group, strict=False)]


def _said(requests: Sequence[tuple[Workload, Way]], say: Callable[[str], None]) -> Iterator[tuple[Workload, Way]]:
    for workload, way in requests:
        say(f"{way.label}, {_title(workload)} ...")
        yield workload, way


def _report(workload: Workload, rates: Rates, texts: Sequence[str], tables: Sequence[_Table]) -> Report:
    document: dict[str, Any] = {
        "version": 1,
        "workload": workload.as_dict(),
        "rates": asdict(rates),
        "tables": [
            {"title": each.title, "layers": each.layers, "rows": [row.as_dict(rates) for row in each.rows]}
            for each in tables
        ],
    }
    text = "\n\n".join([*texts, table.note(rates)])
    return Report(document, text, text)


def _lists(given: argparse.Namespace, title: str, count: Count) -> list[str]:
    """The heaviest kernels and the largest kept tensors, as far as they are asked for."""
    texts = []
    if given.kernels:
        texts.append(f"{title}: the heaviest kernels\n\n{table.heaviest(count, given.kernels, given.markdown)}")
    if given.kept:
        texts.append(f"{title}: kept for the backward\n\n{table.kept(count, given.kept, given.markdown)}")
    return texts


def _workload(given: argparse.Namespace) -> tuple[Workload, int]:
    """The workload, and how many layers the model has in its full size."""
    common = {name: getattr(given, name) for name in ("dtype", "scaler", "optimizer", "clip", "loss_only")}
    if given.file is None:
        from fxamp.tools.bench.train.models import MODELS, require

        name = given.model or _DEFAULT_MODEL
        require(name)
        sizes = dict(MODELS[name].sizes["full"])
        return Workload(name, sizes=sizes, **common), sizes.get("layers", sizes.get("depth", 0))
    if given.model or given.layers:
        raise OptionError(f"{given.file} is a model of its own; --model and --layers are for the models of fxamp-bench")
    if not Path(given.file).is_file():
        raise OptionError(f"{given.file}: there is no such file")
    return Workload(str(Path(given.file).resolve()), **common), 0


def _depth(workload: Workload) -> str:
    """The dimension that ``--layers`` sets; ``""`` where there is none."""
    return next((name for name in ("layers", "depth") if name in workload.sizes), "")


def _policies(dtype: str) -> list[str]:
    return [] if dtype == "float32" else ["auto", f"cuda-{dtype}"]


def _title(workload: Workload) -> str:
    sizes = ", ".join(f"{name} {size}" for name, size in workload.sizes.items())
    settings = [workload.dtype, f"{workload.optimizer}{' clipped' if workload.clip else ''}"]
    settings += ["only the loss leaves the graph"] if workload.loss_only else []
    name = workload.model if workload.sizes else Path(workload.model).name
    return f"{name}{f' ({sizes})' if sizes else ''}: {', '.join(settings)}"
