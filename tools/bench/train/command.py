"""fxamp-bench train: training steps by several ways of mixed precision, side by side."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from fxamp.errors import OptionError
from fxamp.tools.bench.report import Report, add_styles, require_device, some_of
from fxamp.tools.bench.train.experiment import BASELINES, CONTENDERS, DTYPES, OPTIMIZERS, Experiment
from fxamp.tools.bench.train.fp8 import require_fp8
from fxamp.tools.bench.train.result import Comparison
from fxamp.tools.bench.train.table import reported, title
from fxamp.tools.common import charts
from fxamp.tools.common.charts import Bar, bar_chart
from fxamp.tools.common.command_line import Parser, natural, one_of, positive, positive_number
from fxamp.tools.common.output import write_text


def parser(prog: str) -> Parser:
    """The options of this command."""
    from fxamp.lowering_names import LOWERINGS
    from fxamp.tools.bench.models import MODELS, SIZES

    usual = ", ".join(f"{name} on {device}" for device, name in BASELINES.items())
    result = Parser(prog, "Train one model in several ways of mixed precision, in turn, and compare.")
    add = result.add_argument
    add("--model", type=one_of(*MODELS), default="mlp", help=f"{', '.join(MODELS)} (default mlp)")
    add("--size", type=one_of(*SIZES), help="tiny or full (default: tiny on cpu, full on cuda)")
    add("--set", type=_dimension, action="append", metavar="NAME=N", help="another size of the model, as width=256")
    add("--device", type=one_of(*BASELINES), default="cpu", help="cpu (default) or cuda")
    add("--dtype", type=one_of(*DTYPES), default="auto", help=f"{', '.join(DTYPES)} (default auto: fxamp chooses)")
    add("--steps", type=positive, default=10, help="measured steps of a contender in a round (default 10)")
    add("--rounds", type=positive, default=10, help="rounds (default 10)")
    add("--seed", type=natural, default=0, help="of weights and batches (default 0)")
    add("--threads", type=positive, default=1, help="CPU threads; 1 gives steady times (default 1)")
    add("--lowering", type=one_of(*LOWERINGS), default="inductor", help=f"{', '.join(LOWERINGS)} (default inductor)")
    add(
        "--contenders",
        type=some_of(*CONTENDERS),
        help=f"of {','.join(CONTENDERS)} (default: all that the dtype admits, without fp8)",
    )
    add("--optimizer", type=one_of(*OPTIMIZERS), default="AdamW", help=f"{', '.join(OPTIMIZERS)} (default AdamW)")
    add("--clip", type=positive_number, dest="max_norm", metavar="NORM", help="clip gradients to this norm")
    add(
        "--baseline",
        type=one_of(*CONTENDERS),
        help=f"what ratios are taken to (default: {usual})",
    )
    add("--chart", type=Path, help="an SVG file for a bar chart of the step times")
    add_styles(result)
    return result


def run(options: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Check the options, then measure; ``say`` receives lines of progress. Raises OptionError for a user's mistake."""
    from fxamp.tools.bench.models import require, sizes
    from fxamp.tools.bench.train.measure import compare

    _require_chart(options.chart)
    require_device(options.device)
    require(options.model)
    size = options.size or ("full" if options.device == "cuda" else "tiny")
    fields = ("model", "device", "dtype", "steps", "rounds", "seed", "threads", "lowering", "optimizer", "max_norm")
    changed = dict(options.set or ())
    sizes(options.model, size, changed)
    experiment = Experiment(size=size, changed=changed, **{name: getattr(options, name) for name in fields})
    names = _taking_part(options.contenders, experiment)
    comparison = compare(experiment, names, _baseline(options, names), say)
    report = reported(comparison, experiment.rounds)
    if options.chart is not None:
        write_text(_chart(comparison), str(options.chart))
        say(f"the bar chart is in {options.chart}")
    return report


def _require_chart(file: Path | None) -> None:
    """Raise OptionError if there is a file for a chart, and it cannot be drawn or written."""
    if file is not None and not file.absolute().parent.is_dir():
        raise OptionError(f"--chart {file}: there is no folder {file.absolute().parent}")
    if file is not None and not charts.available():
        raise OptionError(f"--chart {file}: {charts.MISSING}")


def _chart(comparison: Comparison) -> str:
    """The time of a step as an SVG bar chart, one bar a contender, with its quartiles."""
    bars = []
    for contender in comparison.contenders:
        ratio = comparison.step_ratio(contender)
        if ratio is not None:
            bars.append(Bar(contender.label, ratio.median, ratio.low, ratio.high))
    base = comparison.named(comparison.baseline)
    return bar_chart(title(comparison), bars, f"time of a step; {base.label if base else comparison.baseline} = 1")


def _taking_part(named: Sequence[str] | None, experiment: Experiment) -> Sequence[str]:
    """The contenders that were named; else all but fp8, those that need a scaled loss only where losses are scaled."""
    scaled = experiment.lower_dtype == "float16"
    for name in named or ():
        if CONTENDERS[name].scaled and not scaled:
            raise OptionError(f"--contenders {name}: needs --dtype float16, since other dtypes' losses are not scaled")
        if CONTENDERS[name].fp8:
            require_fp8(name, experiment)
    return named or [
        name for name, contender in CONTENDERS.items() if not contender.fp8 and (scaled or not contender.scaled)
    ]


def _baseline(options: argparse.Namespace, names: Sequence[str]) -> str:
    """The named baseline, which must take part; else the device's, if it does; else the first contender."""
    if options.baseline is not None and options.baseline not in names:
        raise OptionError(f"--baseline {options.baseline} is none of the contenders: {', '.join(names)}")
    usual = BASELINES[options.device]
    return options.baseline or (usual if usual in names else names[0])


def _dimension(text: str) -> tuple[str, int]:
    """An argparse ``type``: a name and a number, ``width=256``."""
    name, equals, number = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: NAME=N, as width=256")
    return name, positive(number)
