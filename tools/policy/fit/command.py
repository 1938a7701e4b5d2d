"""``fxamp-policy fit``: find the policy for a model's training step on a GPU, within its memory."""

from argparse import Namespace
from collections.abc import Iterator
from math import inf
from pathlib import Path

import torch

from fxamp.errors import FxampError, ListingError, OptionError, PolicyError
from fxamp.policy import Policy
from fxamp.tools.common import charts
from fxamp.tools.common.command_line import Parser, one_of, positive, positive_number
from fxamp.tools.common.formatting import size
from fxamp.tools.common.output import require_folder
from fxamp.tools.common.progress import say
from fxamp.tools.inputs.kinds import bound_names, program_syntax
from fxamp.tools.inputs.model_file import program
from fxamp.tools.policy.fit.answer import Answer, write_answer
from fxamp.tools.policy.fit.batch import largest
from fxamp.tools.policy.fit.candidate_costs import Limits, Pricing
from fxamp.tools.policy.fit.candidates import Candidate, Family
from fxamp.tools.policy.fit.choice import PREFERENCES, PricedPolicies
from fxamp.tools.policy.fit.counts import Counting, batch_of
from fxamp.tools.policy.fit.depth import DEPTHS, depth_of
from fxamp.tools.policy.fit.errors import Measuring
from fxamp.tools.policy.fit.gpus import GPUS, amount
from fxamp.tools.policy.patch import load_model

PROG = "fxamp-policy fit"

#: The default of ``--time`` with ``--prefer error``: without a limit, the slowest policy would win.
_TIME = 1.1


def parser(prog: str) -> Parser:
    """Return the subcommand's options."""
    result = Parser(
        prog,
        "Find the policy with which a training step fits a GPU's memory: the fastest of the shipped policies and their "
        "combinations whose gradient error is small enough. Cost is counted for that GPU, which need not be there, and "
        "the error is measured against float64. MODEL.py defines model and inputs, and perhaps batches and "
        "loss(output). The command runs it, and the model.",
    )
    add = result.add_argument
    add(
        "model",
        metavar="MODEL.py",
        help="model and inputs are counted; the error is measured on batches, else on inputs",
    )
    add("--gpu", type=one_of(*GPUS), default="h100", help=f"{', '.join(GPUS)} (h100)")
    add("--memory", type=amount, metavar="BYTES", help='memory that a step may take, "40GiB" (the GPU\'s own)')
    add(
        "--error",
        type=positive_number,
        default=1.5,
        metavar="R",
        help="limit of the gradient's error, over the base's (1.5)",
    )
    add(
        "--time",
        type=positive_number,
        metavar="R",
        help="limit of a step's time, over the base's (none; 1.1 with --prefer error)",
    )
    add(
        "--prefer", type=one_of(*PREFERENCES), default="time", help=f"what to minimize: {', '.join(PREFERENCES)} (time)"
    )
    add("--base", dest="policy", default="cuda-bfloat16", metavar="P", help="the policy to extend (cuda-bfloat16)")
    add("--loss-only", action="store_true", help="training reads the loss alone, so other results are not computed")
    add("--sister", metavar="SMALL.py", help="a small model with the same modules, on which the error is measured")
    add("--batches", metavar="N", type=positive, help="measure the error on the first N batches only")
    add("--batch", action="store_true", help="count the largest batch with which a step fits")
    add("--chart", metavar="FILE", help="draw time, memory and error of all policies: an SVG file")
    add("--output", metavar="FILE", help="write the policy to this file; standard output unless given")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    return result


def _say(text: str) -> None:
    say(f"{PROG}: {text}")


def run(options: Namespace) -> int:
    """Write the policy; returns 1 if none fits."""
    memory = _checked(options)
    base, gpu = Policy.load(options.policy), GPUS[options.gpu]
    if base.device != "cuda":
        raise PolicyError(f"--base {options.policy}: it is for {base.device}; accepted: a policy for cuda")
    torch.manual_seed(0)
    work = load_model(Namespace(**{**vars(options), "model": options.sister or options.model}), _say)
    model = program(options.model, _say).model if options.sister else work.model
    candidates = [*Family(options.policy, base, gpu.formats).candidates(work.model, options.loss_only)]
    with Counting(options.model) as counting:
        measuring = Measuring(work, tuple(work.batches()))
        pricing = Pricing(model, depth_of(model), counting, measuring, gpu.rates, _say)
        priced = pricing.prices(candidates)
        first = next(iter(priced.values()))[1]
        time = options.time or (_TIME if options.prefer == "error" else inf)
        limits = Limits(memory, first.milliseconds * time, first.error * options.error)
        choice = PricedPolicies(priced, limits, options.prefer)
        write_answer(Answer(options, choice, list(_notes(options, pricing, choice))))
    return 0 if choice.best is not None else 1


def _checked(options: Namespace) -> int:
    """Return the most bytes of a step. Raises FxampError for options that are not accepted."""
    gpu = GPUS[options.gpu]
    memory: int = options.memory or gpu.memory
    if memory > gpu.memory:
        raise OptionError(f"--memory {size(memory)}: the {options.gpu} has {size(gpu.memory)}; accepted: up to that")
    if options.chart is not None:
        if not charts.available():
            raise OptionError(f"--chart: {charts.MISSING}")
        if not options.chart.endswith(".svg"):
            raise OptionError(f"--chart {options.chart!r}: it is an SVG file; accepted: '{options.chart}.svg'")
        require_folder(options.chart, options.model, options.sister, option="--chart")
    names = bound_names(program_syntax(options.model, "a Python file with model and inputs"))
    if not {"inputs", "*"} & names:
        raise ListingError(f"{options.model}: it defines no inputs, which the count takes; accepted: model and inputs")
    return memory


def _notes(options: Namespace, pricing: Pricing, choice: PricedPolicies) -> Iterator[str]:
    """Yield the lines below the table."""
    best = choice.best
    if best is None:
        yield "\n".join(choice.shortage())
    else:
        yield f"{best[0].name}: least {options.prefer} of {len(choice.priced)} policies within the limits"
    if options.batch:
        smallest = choice.least(Limits(inf, choice.limits.milliseconds, choice.limits.error), "memory")
        yield _largest_batch(options, pricing, (best or smallest or next(iter(choice.priced.values())))[0], choice)
    if options.sister:
        yield f"The error is that of {Path(options.sister).name}, not of {Path(options.model).name}."
    depth = f" from {DEPTHS[0]} and {DEPTHS[1]} of its {pricing.depth} layers" if pricing.depth else ""
    yield (
        f"Counted for the GPU{depth}, not measured; the error is measured here. Memory: parameters, state of AdamW, "
        "and the larger of peak and gradients; not what CUDA itself takes."
    )


def _largest_batch(options: Namespace, pricing: Pricing, candidate: Candidate, choice: PricedPolicies) -> str:
    """Say which batch is the largest that fits under ``candidate``, as counted, and what the next one would take."""
    limit = choice.limits.memory
    whole = program(options.model, lambda _: None)
    batch = batch_of((whole.args, whole.kwargs))
    if not batch:
        raise ListingError(f"{options.model}: --batch: inputs hold no tensor with a first dimension")

    def memory(size_: int) -> float:
        bytes_ = pricing.memory(candidate.policy, size_)
        _say(f"{candidate.name}, batch {size_}: {size(round(bytes_))}")
        return bytes_

    try:
        bytes_of = largest(memory, batch, limit)
    except FxampError as error:
        return f"the largest batch under {candidate.name} is not known: {error}"
    fits = max((n for n, bytes_ in bytes_of.items() if bytes_ <= limit), default=0)
    if not fits:
        return f"no batch fits under {candidate.name}: 1 would take {size(round(bytes_of[1]))}"
    largest_ = f"the largest batch under {candidate.name} is {fits}, which takes {size(round(bytes_of[fits]))}"
    if fits + 1 not in bytes_of:
        return f"{largest_}; larger ones were not counted"
    return f"{largest_}; {fits + 1} would take {size(round(bytes_of[fits + 1]))}"
