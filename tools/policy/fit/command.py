"""``fxamp-policy fit``: say the GPU and its memory, and get the policy for a model's training step."""

import json
from argparse import Namespace
from collections.abc import Iterator
from math import inf
from pathlib import Path

import torch

from fxamp.errors import FxampError, ListingError, OptionError, PolicyError
from fxamp.policy import Policy
from fxamp.tools.common.command_line import Parser, one_of, positive, positive_number
from fxamp.tools.common.formatting import plural, size
from fxamp.tools.common.interrupt import so_far
from fxamp.tools.common.output import put, write_text
from fxamp.tools.common.progress import say
from fxamp.tools.inputs.kinds import bound_names, program_syntax
from fxamp.tools.policy.fit.answer import content, effect, policy_text, table
from fxamp.tools.policy.fit.choice import PREFERENCES, Limits, require_solver
from fxamp.tools.policy.fit.counts import Counting
from fxamp.tools.policy.fit.decisions import Language
from fxamp.tools.policy.fit.errors import Measuring
from fxamp.tools.policy.fit.gpus import GPUS, amount
from fxamp.tools.policy.fit.layers import scopes, shortened
from fxamp.tools.policy.fit.prices import Pricing
from fxamp.tools.policy.fit.search import Candidate, Search
from fxamp.tools.policy.fit.store import Store
from fxamp.tools.policy.patch import base_policy, load_model

PROG = "fxamp-policy fit"

#: Shipped variants that the answer stands beside.
_VARIANTS = ("fast-norms", "fast", "lean", "leanest", "fp8", "fp8-rowwise")


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
    add("--prefer", type=one_of(*PREFERENCES), default="time", help=f"{', '.join(PREFERENCES)}: what is least (time)")
    add("--base", dest="policy", default="cuda-bfloat16", metavar="P", help="the policy to extend (cuda-bfloat16)")
    add("--batches", metavar="N", type=positive, help="measure the error on the first N batches only")
    add("--frontier", metavar="N", type=positive, default=3, help="policies of smaller memory in the table (3)")
    add("--output", metavar="FILE", help="where the policy is written; standard output unless given")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    return result


def _say(text: str) -> None:
    say(f"{PROG}: {text}")


def run(options: Namespace) -> int:
    """Write the policy; returns 1 if none fits."""
    require_solver()
    gpu = GPUS[options.gpu]
    memory = options.memory or gpu.memory
    if memory > gpu.memory:
        raise OptionError(f"--memory {size(memory)}: the {options.gpu} has {size(gpu.memory)}; accepted: up to that")
    base = Policy.load(options.policy)
    if base.device != "cuda":
        raise PolicyError(f"--base {options.policy}: it is for {base.device}; accepted: a policy for cuda")
    names = bound_names(program_syntax(options.model, "a Python file with model and inputs"))
    if not {"inputs", "*"} & names:
        raise ListingError(f"{options.model}: it defines no inputs, which the count takes; accepted: model and inputs")
    torch.manual_seed(0)
    work = load_model(options, _say)
    store = Store.of(options.model)
    batches = tuple(work.batches())
    with Counting(options.model, store) as counting:
        measuring = Measuring(work, batches, store)
        here = base_policy(options.policy, work, lambda _: None, runs=True, emulate=True)[1]
        pricing = Pricing(base, here, Language(base, gpu.fp8), counting, measuring, gpu.rates, _say)
        with so_far(lambda: f"{_fresh(pricing)}; they are kept, and the same command goes on from there"):
            return _answer(options, pricing, memory)


def _answer(options: Namespace, pricing: Pricing, memory: int) -> int:
    own = Candidate(options.policy, pricing.base, pricing.of([]))
    limits = Limits(memory, own.price.square * options.error**2)
    model, language = pricing.measuring.work.model, pricing.language
    decisions = language.decisions(scopes(model), model)
    with shortened(model):
        short = language.decisions(scopes(model), model)
    search = Search(pricing, decisions, pricing.options(decisions, short, own.price), own.price, _say)
    search.add(own)
    for candidate in _shipped(pricing):
        search.add(candidate)
    search.look("chosen", limits, options.prefer)
    smallest = search.look("smallest", Limits(inf, limits.square), "memory")
    if smallest is not None:
        span = own.price.memory - smallest.price.memory
        for at in range(1, options.frontier):
            most = own.price.memory - span * at / options.frontier
            search.look(f"at {size(round(most))}", Limits(most, limits.square), "time")
    chosen = search.best(limits, options.prefer)
    _print(options, search, chosen, limits)
    return 0 if chosen is not None else 1


def _print(options: Namespace, search: Search, chosen: Candidate | None, limits: Limits) -> None:
    text = ""
    if chosen is not None:
        text = policy_text(chosen, options.policy, list(_head(options, search, chosen, limits)), search, options.output)
        if options.output is not None:
            write_text(text, options.output)
    notes = list(_notes(search, chosen, limits))
    if options.json:
        put(
            json.dumps(
                {
                    "version": 1,
                    "gpu": options.gpu,
                    "memory": limits.memory,
                    "error": limits.square**0.5,
                    "chosen": chosen.name if chosen is not None else None,
                    "policies": [content(candidate) for candidate in search.candidates.values()],
                    "policy": text,
                    "notes": notes,
                },
                indent=2,
            )
        )
        return
    shown = "\n\n".join([table(search, chosen, limits), *notes])
    if options.output is None and text:
        say(shown)
        write_text(text)
    else:
        put(shown)


def _head(options: Namespace, search: Search, chosen: Candidate, limits: Limits) -> Iterator[str]:
    price, base = chosen.price, search.base
    yield f"fxamp-policy fit: {Path(options.model).name} on one {options.gpu}, at most {size(round(limits.memory))}."
    yield (
        f"A step takes {size(round(price.memory))} ({options.policy}: {size(round(base.memory))}), an estimated "
        f"{price.milliseconds / base.milliseconds:.3f} of its time, and {price.error / base.error:.3f} of its error."
    )


def _notes(search: Search, chosen: Candidate | None, limits: Limits) -> Iterator[str]:
    if chosen is None:
        exact = [one for one in search.candidates.values() if one.price.square <= limits.square]
        least = min(exact, key=lambda one: one.price.memory)
        missing = size(round(least.price.memory - limits.memory))
        yield f"nothing fits: {missing} are missing; the smallest within the error is {least.name!r}"
        added = [
            (price, f"{decision.name}, {option.name}, {decision.scope.name}")
            for decision, prices in zip(search.decisions, search.prices, strict=True)
            for option, price in zip(decision.options, prices, strict=True)
        ]
        price, words = min(added, key=lambda pair: pair[0].memory)
        yield f"what brings most: {words}: {effect(price, search.base)}"
    elif chosen.sum is not None:
        ratio = chosen.price.memory / chosen.sum.memory, chosen.price.error / chosen.sum.error
        yield f"of its options' sum it takes {ratio[0]:.3f} of the memory and {ratio[1]:.3f} of the error"
    yield (
        "Memory: parameters, state of AdamW, and the larger of peak and gradients; not what CUDA itself takes. Counted "
        f"for the GPU, not measured; the error is measured here. {_fresh(search.pricing)}."
    )


def _fresh(pricing: Pricing) -> str:
    counts, errors = pricing.counting.fresh, pricing.measuring.fresh
    return f"{plural(counts, 'count')} and {plural(errors, 'error')} were new"


def _shipped(pricing: Pricing) -> Iterator[Candidate]:
    """Yield the shipped variants that can be counted."""
    family = f"{pricing.base.device}-{pricing.base.lower_precision_fp}"
    for name in [family, *(f"{family}-{variant}" for variant in _VARIANTS)]:
        there = Policy.load(name)
        if there.has_fp8 and not pricing.language.fp8:
            continue
        here = base_policy(name, pricing.measuring.work, lambda _: None, runs=True, emulate=True)[1]
        try:
            yield Candidate(name, there, pricing.price(there, here))
        except FxampError as error:
            _say(f"{name}: left out: {error}")
