"""``fxamp-policy fit``: say the GPU and its memory, and get the policy for a model's training step."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path

import torch

from fxamp.errors import FxampError, ListingError, OptionError, PolicyError
from fxamp.policy import Policy, Rule, variant_names
from fxamp.tools.common import charts
from fxamp.tools.common.command_line import Parser, natural, one_of, positive, positive_number
from fxamp.tools.common.formatting import plural, size
from fxamp.tools.common.interrupt import so_far
from fxamp.tools.common.output import require_folder
from fxamp.tools.common.progress import say
from fxamp.tools.inputs.kinds import bound_names, program_syntax
from fxamp.tools.inputs.model_file import program
from fxamp.tools.policy.fit.answer import Answer, write_answer
from fxamp.tools.policy.fit.batch import largest
from fxamp.tools.policy.fit.choice import PREFERENCES, Limits, require_solver
from fxamp.tools.policy.fit.counts import Counting, batch_of
from fxamp.tools.policy.fit.decisions import Language
from fxamp.tools.policy.fit.errors import Measuring
from fxamp.tools.policy.fit.gpus import GPUS, amount
from fxamp.tools.policy.fit.layers import scopes, shortened
from fxamp.tools.policy.fit.prices import Price, Pricing
from fxamp.tools.policy.fit.search import Candidate, Search, summary
from fxamp.tools.policy.fit.store import Store
from fxamp.tools.policy.fit.training import train
from fxamp.tools.policy.patch import base_policy, load_model

PROG = "fxamp-policy fit"

#: With ``--prefer error``, unless ``--time`` says otherwise: errors would fall for ever more time.
_TIME = 1.1

#: Policies that are composed for each point of the frontier.
_FRONTIER_ROUNDS = 2

#: The rule of ``--loss-only``.
_LOSS_ONLY = Rule(
    "loss-only",
    drop=True,
    args={"result": {"dtype": ["float32", "bfloat16", "float16"], "rank": ">=1"}},
    why="The training reads the loss alone.",
)


def parser(prog: str) -> Parser:
    """Return the subcommand's options."""
    result = Parser(
        prog,
        "Find the policy with which a training step fits a GPU's memory: fastest within an error of the gradient, "
        "counted for that GPU, which need not be there, and measured against float64. MODEL.py defines model and "
        "inputs, and perhaps batches and loss(output); it is run, and so is the model.",
    )
    add = result.add_argument
    add("model", metavar="MODEL.py", help="model and inputs are counted; batches, or else inputs, give the error")
    add("--gpu", type=one_of(*GPUS), default="h100", help=f"{', '.join(GPUS)} (h100)")
    add("--memory", type=amount, metavar="BYTES", help='that a step may take, "40GiB"; the GPU\'s own unless given')
    add("--error", type=positive_number, default=1.5, metavar="R", help="of the gradient, over the base's (1.5)")
    add("--time", type=positive_number, metavar="R", help="of a step, over the base's (any; 1.1 with --prefer error)")
    add("--prefer", type=one_of(*PREFERENCES), default="time", help=f"{', '.join(PREFERENCES)}: what is least (time)")
    add("--base", dest="policy", default="cuda-bfloat16", metavar="P", help="the policy to extend (cuda-bfloat16)")
    add("--loss-only", action="store_true", help="results beside the loss are not made: the training reads none")
    add("--sister", metavar="SMALL.py", help="a small model with the same modules, on which the error is measured")
    add("--batches", metavar="N", type=positive, help="measure the error on the first N batches only")
    add("--frontier", metavar="N", type=natural, default=3, help="policies of smaller memory in the table (3)")
    add("--batch", action="store_true", help="count the largest batch with which a step fits")
    add("--steps", metavar="N", type=positive, help="train N steps under base and answer, and compare the losses")
    add("--chart", metavar="FILE", help="draw time, memory and error of all policies: an SVG file")
    add("--output", metavar="FILE", help="where the policy is written; standard output unless given")
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
    with Counting(options.model, Store.of(options.model)) as counting:
        measuring = Measuring(work, tuple(work.batches()), Store.of(work.file))
        here = base_policy(options.policy, work, lambda _: None, runs=True, emulate=True)[1]
        there = replace(base, rules=(*base.rules, _LOSS_ONLY)) if options.loss_only else base
        language = Language(base, gpu.formats)
        twins = {
            (option.scope.name, option.name): option
            for decision in language.decisions(scopes(work.model), work.model)
            for option in decision.options
        }
        parts = scopes(model)
        with shortened(model):
            both = parts, scopes(model)
        pricing = Pricing(model, there, here, language, counting, measuring, both, twins, gpu.rates, _say)
        with so_far(lambda: f"{_fresh(pricing)}; they are kept, and the same command goes on from there"):
            return _answer(options, pricing, memory)


def _checked(options: Namespace) -> int:
    """Return the most bytes of a step. Raises FxampError for options that cannot be."""
    require_solver()
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


def _answer(options: Namespace, pricing: Pricing, memory: int) -> int:
    base, model, language = pricing.of([]), pricing.model, pricing.language
    _say(f"{options.policy}: {size(round(base.memory))}")
    time = options.time or (_TIME if options.prefer == "error" else inf)
    limits = Limits(memory, base.square * options.error**2, base.milliseconds * time)
    decisions = language.decisions(scopes(model), model)
    with shortened(model):
        short = language.decisions(scopes(model), model)
    _say(f"{plural(sum(len(one.options) - 1 for one in decisions), 'option')} of {plural(len(decisions), 'decision')}")
    search = Search(pricing, decisions, pricing.options(decisions, short, base), base, _say)
    search.ship(options.policy, pricing.base, base)
    for name, policy, price in _shipped(pricing):
        _say(f"{name}: {summary(price, base)}")
        search.ship(name, policy, price)
    search.look(limits, options.prefer)
    if options.frontier or search.best(limits, options.prefer) is None:
        _frontier(search, limits, options.frontier)
    best = search.best(limits, options.prefer)
    write_answer(Answer(options, search, best, limits, list(_notes(options, search, best, limits))))
    return 0 if best is not None else 1


def _frontier(search: Search, limits: Limits, most: int) -> None:
    """Look for policies between the base and the smallest one."""
    exact = replace(limits, memory=inf)
    search.look(exact, "memory")
    smallest = search.best(exact, "memory")
    if smallest is not None:
        span = search.base.memory - smallest.price.memory
        for at in range(1, most):
            search.look(replace(limits, memory=search.base.memory - span * at / most), "time", _FRONTIER_ROUNDS)


def _notes(options: Namespace, search: Search, best: Candidate | None, limits: Limits) -> Iterator[str]:
    """Yield what stands below the table."""
    pricing = search.pricing
    if best is None:
        yield _missing(search, limits)
    elif best.options:
        ratio = best.price.memory / best.sum.memory, best.price.error / best.sum.error
        yield f"{best.name} takes {ratio[0]:.3f} of its options' sum of memory, and has {ratio[1]:.3f} of their error"
        yield _beside_shipped(search, best, limits, options.prefer)
    else:
        yield f"{best.name} is the answer as it is: nothing that was put together beats it within the limits"
    if options.batch:
        yield _largest_batch(options, search, best or _smallest(search, limits), limits.memory)
    if options.steps is not None and best is not None:
        here = pricing.runs(best.options) if best.options else _here(best.name, pricing)
        yield train(pricing.measuring, pricing.here, here, options.steps).text(options.policy, best.name)
    if options.sister:
        yield f"The error is that of {Path(options.sister).name}, not of {Path(options.model).name}."
    yield (
        "Memory: parameters, state of AdamW, and the larger of peak and gradients; not what CUDA itself takes. Counted "
        f"for the GPU, not measured; the error is measured here. {_fresh(pricing)}."
    )


def _beside_shipped(search: Search, best: Candidate, limits: Limits, prefer: str) -> str:
    """Say how ``best``, which was composed, is beside the best shipped policy within the limits."""
    other = search.best(limits, prefer, search.shipped)
    if other is None:
        return "no shipped policy is within the limits"
    own, theirs = best.price, other.price
    pairs = {
        "memory": (own.memory, theirs.memory),
        "time": (own.milliseconds, theirs.milliseconds),
        "error": (own.error, theirs.error),
    }
    words = (f"{one / (its or 1.0):.3f} of the {word}" for word, (one, its) in pairs.items())
    return f"beside {other.name}, the best shipped one within the limits: {', '.join(words)}"


def _smallest(search: Search, limits: Limits) -> Candidate:
    """Return the policy of least memory within the other limits, or else of least error."""
    smallest = search.best(replace(limits, memory=inf), "memory") or search.best(Limits(), "error")
    assert smallest is not None
    return smallest


def _missing(search: Search, limits: Limits) -> str:
    """Say how many bytes are missing, and which decision would bring most, counted with all others."""
    least = _smallest(search, limits)
    if beyond := [*replace(limits, memory=inf).excesses(least.price)]:
        return f"nothing fits: {least.name}, which has the least error, is {' and '.join(beyond)}"
    composed = search.best(replace(limits, memory=inf), "memory", search.composed) or least
    text = (
        f"nothing fits: {size(round(least.price.memory - limits.memory))} are missing; the smallest within the other "
        f"limits is {least.name}, whose fullest moment is the {least.price.fullest}"
    )
    step = search.next_smaller(composed)
    if step is None:
        return f"{text}; no other decision lowers it"
    decision, option, smaller = step
    words = f"{decision.name} of {decision.scope.name}: {option.name}"
    return f"{text}\nwhat brings most on top of {composed.name}: {words}: {summary(smaller.price, search.base)}"


def _largest_batch(options: Namespace, search: Search, candidate: Candidate, limit: float) -> str:
    """Say which batch is the largest that fits under ``candidate``, as counted, and what the next one would take."""
    whole = program(options.model, lambda _: None)
    batch = batch_of((whole.args, whole.kwargs))
    if not batch:
        raise ListingError(f"{options.model}: --batch: inputs hold no tensor with a first dimension")

    def memory(size_: int) -> float:
        bytes_ = search.pricing.memory(candidate.policy, size_)
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


def _fresh(pricing: Pricing) -> str:
    counts, errors = pricing.counting.fresh, pricing.measuring.fresh
    return f"{plural(counts, 'count')} and {plural(errors, 'error')} were new"


def _here(name: str, pricing: Pricing) -> Policy:
    """Return a shipped policy, or the base, as the model that is measured runs it."""
    return base_policy(name, pricing.measuring.work, lambda _: None, runs=True, emulate=True)[1]


def _shipped(pricing: Pricing) -> Iterator[tuple[str, Policy, Price]]:
    """Yield the shipped variants that can be counted and measured, with their prices."""
    family = f"{pricing.base.device}-{pricing.base.lower_precision_fp}"
    eight_bits = any(rule.in_fp8 for option in pricing.twins.values() for rule in option.rules)
    for name in [family, *(name for name in variant_names() if name.startswith(f"{family}-"))]:
        there = Policy.load(name)
        if there.has_fp8 and not (eight_bits and pricing.language.multiplies(there)):
            continue
        dropping = tuple(rule for rule in pricing.base.rules if rule == _LOSS_ONLY)
        there = replace(there, rules=(*there.rules, *dropping))
        try:
            yield name, there, pricing.price(there, _here(name, pricing))
        except FxampError as error:
            _say(f"{name}: left out: {error}")
