"""fxamp-bench train: training steps in several kinds of mixed precision, side by side."""

import argparse
from collections.abc import Callable, Sequence

from fxamp.errors import OptionError
from fxamp.tools.bench.report import Report, add_styles, require_device, some_of
from fxamp.tools.bench.train.experiment import (
    AUTOCAST,
    CONTENDERS,
    DEVICES,
    DTYPES,
    FLOAT32_COMPILED,
    OPTIMIZERS,
    Experiment,
    usual_baseline,
)
from fxamp.tools.bench.train.fp8 import require_fp8
from fxamp.tools.bench.train.table import reported
from fxamp.tools.common.command_line import Parser, natural, one_of, positive, positive_number

#: Measured steps of a round, and rounds of a start, by size: in "small" a step takes up to a second.
_AMOUNTS = {"tiny": (10, 10), "small": (2, 4), "full": (10, 10)}


def parser(prog: str) -> Parser:
    """The options of this command."""
    from fxamp.lowering_names import LOWERINGS
    from fxamp.tools.bench.models import MODELS, SIZES

    result = Parser(prog, "Train one model in several kinds of mixed precision, in turn, and compare them.")
    add = result.add_argument
    add("--model", type=one_of(*MODELS), help=f"{', '.join(MODELS)} (default mlp)")
    add("--every", action="store_true", help="one table of all large models under torch and each kind of policy")
    add("--size", type=one_of(*SIZES), help=f"{', '.join(SIZES)} (default: full on cuda; small on a CPU with bfloat16)")
    add(
        "--set",
        type=_dimension,
        action="append",
        metavar="NAME=N",
        help="change a dimension of the model, such as width=256",
    )
    add("--layers", type=positive, metavar="N", help="number of layers of the model; of stages for resnet50")
    add("--device", type=one_of(*DEVICES), default="cpu", help="cpu (default) or cuda")
    add("--dtype", type=one_of(*DTYPES), help=f"{', '.join(DTYPES)} (default: the policies', else auto: fxamp chooses)")
    add(
        "--policy",
        action="append",
        default=[],
        metavar="P",
        help="add fxamp under this policy, a name or a file; may be repeated",
    )
    add(
        "--policy-optimizer",
        action="store_true",
        help="step as the policies' [optimizer] tables say (else torch's step)",
    )
    add("--all-results", action="store_true", help="the model returns all results, such as logits, not the loss alone")
    add(
        "--contenders",
        type=some_of(*CONTENDERS),
        help=f"some of {','.join(CONTENDERS)} (default: all that suit, no fp8)",
    )
    add("--baseline", help="the contender that ratios are taken to (default: the best other way on the device)")
    add("--steps", type=positive, help="measured steps of a contender in a round (default 10; 2 for small)")
    add("--rounds", type=positive, help="rounds of a start (default 10; 4 for small)")
    add("--starts", type=positive, default=3, help="processes of each contender, one after the other (default 3)")
    add("--seed", type=natural, default=0, help="seed of weights and batches (default 0)")
    add("--jobs", type=positive, default=1, help="contenders that compile at once; they step in turn (default 1)")
    add("--threads", type=positive, help="CPU threads (default: 1 for tiny, else as many as torch takes)")
    add("--lowering", type=one_of(*LOWERINGS), default="inductor", help=f"{', '.join(LOWERINGS)} (default inductor)")
    add("--optimizer", type=one_of(*OPTIMIZERS), default="AdamW", help=f"{', '.join(OPTIMIZERS)} (default AdamW)")
    add("--clip", type=positive_number, dest="max_norm", metavar="NORM", help="clip gradients to this norm")
    add("--chart", metavar="FILE", help="draw time against memory, as SVG")
    add_styles(result)
    return result


def run(options: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Check the options, then measure; ``say`` receives lines of progress. Raises FxampError for a user's mistake."""
    from fxamp.tools.bench.train.chart import require_chart, write_chart
    from fxamp.tools.bench.train.every import report_every
    from fxamp.tools.bench.train.measure import compare

    require_device(options.device)
    require_chart(options)
    if options.every:
        return report_every(options, experiment_of, say)
    experiment = experiment_of(options, options.model or "mlp")
    names = _taking_part(options.contenders, experiment)
    comparison = compare(experiment, names, _baseline(options.baseline, experiment, names), say)
    if options.chart and not comparison.interrupted:
        write_chart(comparison, options.chart)
    return reported(comparison)


def experiment_of(options: argparse.Namespace, model: str) -> Experiment:
    """Return the experiment with a model that the options describe. Raises FxampError for a user's mistake."""
    import torch

    from fxamp.tools.bench.models import depth_name, require, sizes
    from fxamp.torch_devices import native_bfloat16

    require(model)
    usual = "full" if options.device == "cuda" else "small" if native_bfloat16("cpu") else "tiny"
    size, changed = options.size or usual, dict(options.set or ())
    if options.layers:
        changed[depth_name(sizes(model, size, {})) or "layers"] = options.layers
    sizes(model, size, changed)
    fields = ("device", "starts", "jobs", "seed", "lowering", "optimizer", "policy_optimizer", "all_results")
    steps, rounds = _AMOUNTS[size]
    return Experiment(
        model,
        size,
        changed=changed,
        policies=tuple(dict.fromkeys(options.policy)),
        dtype=options.dtype or _dtype_of(options.policy, options.device),
        threads=options.threads or (1 if size == "tiny" else torch.get_num_threads()),
        steps=options.steps or steps,
        rounds=options.rounds or rounds,
        max_norm=options.max_norm,
        **{name: getattr(options, name) for name in fields},
    )


def _dtype_of(policies: Sequence[str], device: str) -> str:
    """Return the 16-bit dtype of the policies, "auto" without one. Raises PolicyError for one that cannot run there."""
    import torch

    from fxamp.backend.policy_in_force import resolve_here
    from fxamp.policy import Policy

    named = [resolve_here(Policy.load(name), torch.device(device)) for name in policies if name != "auto"]
    return named[0].lower_precision_fp if named else "auto"


def _taking_part(named: Sequence[str] | None, experiment: Experiment) -> Sequence[str]:
    """The contenders that were named, then the policies; else those of torch's that suit and the policies, or fxamp.

    Those that need a scaled loss take part only where losses are scaled; fp8 and option "nonfinite" if named.
    """
    scaled = experiment.lower_dtype == "float16"
    for name in named or ():
        if CONTENDERS[name].scaled and not scaled:
            raise OptionError(f"--contenders {name}: needs --dtype float16, since other dtypes' losses are not scaled")
        if CONTENDERS[name].fp8:
            require_fp8(name, experiment)
    if named:
        return [*named, *experiment.policies]
    if experiment.policies:
        return [FLOAT32_COMPILED, AUTOCAST, *experiment.policies]
    return [name for name, contender in CONTENDERS.items() if contender.usual and (scaled or not contender.scaled)]


def _baseline(named: str | None, experiment: Experiment, names: Sequence[str]) -> str:
    """The named baseline, which must take part; else the device's, if it does; else the first contender."""
    if named is not None and named not in names:
        raise OptionError(f"--baseline {named} is not one of the contenders: {', '.join(names)}")
    usual = usual_baseline(experiment.device)
    return named or (usual if usual in names else names[0])


def _dimension(text: str) -> tuple[str, int]:
    """An argparse ``type``: a name and a number, ``width=256``."""
    name, equals, number = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: NAME=N, as width=256")
    return name, positive(number)
