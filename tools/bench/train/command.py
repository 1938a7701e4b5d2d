"""fxamp-bench train: training steps by several ways of mixed precision, side by side."""

import argparse
from collections.abc import Callable, Sequence

from fxamp.errors import OptionError
from fxamp.tools.bench.report import Report, add_styles, require_device, some_of
from fxamp.tools.bench.train.experiment import BASELINES, CONTENDERS, DTYPES, OPTIMIZERS, Experiment
from fxamp.tools.bench.train.fp8 import require_fp8
from fxamp.tools.bench.train.table import reported
from fxamp.tools.common.command_line import Parser, natural, one_of, positive, positive_number


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
    add_styles(result)
    return result


def run(options: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Check the options, then measure; ``say`` receives lines of progress. Raises OptionError for a user's mistake."""
    from fxamp.tools.bench.models import require, sizes
    from fxamp.tools.bench.train.measure import compare

    require_device(options.device)
    require(options.model)
    size = options.size or ("full" if options.device == "cuda" else "tiny")
    fields = ("model", "device", "dtype", "steps", "rounds", "seed", "threads", "lowering", "optimizer", "max_norm")
    changed = dict(options.set or ())
    sizes(options.model, size, changed)
    experiment = Experiment(size=size, changed=changed, **{name: getattr(options, name) for name in fields})
    names = _taking_part(options.contenders, experiment)
    return reported(compare(experiment, names, _baseline(options, names), say), experiment.rounds)


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
