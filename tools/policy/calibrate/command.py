"""``fxamp-policy calibrate``: a policy patch from the ranges of a model's own values and gradients."""

from argparse import Namespace
from collections.abc import Collection, Iterator
from math import frexp

from fxamp.dtypes import SCALED_DTYPES
from fxamp.errors import OptionError
from fxamp.graph_text.model import short_op
from fxamp.policy import CastRule, Category, LossScale, Policy
from fxamp.tools.common.command_line import Parser, number
from fxamp.tools.common.formatting import plural
from fxamp.tools.common.interrupt import SoFar
from fxamp.tools.common.output import notice, write_text
from fxamp.tools.common.progress import say
from fxamp.tools.policy.batches import Workload
from fxamp.tools.policy.calibrate.evidence import Evidence, gather
from fxamp.tools.policy.calibrate.ranges import Format
from fxamp.tools.policy.calibrate.rules import rules_for
from fxamp.tools.policy.calibrate.table import fp8_summary, summary
from fxamp.tools.policy.calibrate.troubles import UNDERFLOW, Limits, exponent, fitting_shift, share
from fxamp.tools.policy.patch import NONFINITE, add_model, base_policy, load_model, patch_text
from fxamp.tools.policy.places import ModuleOp

PROG = "fxamp-policy calibrate"

_POWER_OF_TWO = number("a power of two, such as 65536 or 0.25", lambda value: value > 0 and frexp(value)[0] == 0.5)
_SHARE = number("a share; accepted: a number from 0 to 1", lambda value: 0 <= value <= 1)


def parser(prog: str) -> Parser:
    """Return the subcommand's options."""
    parser = Parser(
        prog,
        "Run a model's batches in float32, watch the ranges of its values and gradients, and propose a policy patch: "
        "float32 where they do not fit 16 bits, 16 bits where products in fp8 lose their operands. MODEL.py defines "
        f"model and batches (or inputs), and perhaps loss(output). The command runs it, and the model. {NONFINITE}.",
    )
    add_model(parser, "the policy to extend; DEVICE-float16 unless given, for the model's device")
    add = parser.add_argument
    add(
        "--loss-scale",
        metavar="S",
        type=_POWER_OF_TWO,
        help="what gradients are multiplied by, a power of two; unless given, the policy's (65536) for float16, "
        "lowered until no gradient overflows, and 1 for bfloat16",
    )
    add(
        "--underflow",
        metavar="SHARE",
        type=_SHARE,
        default=UNDERFLOW,
        help="the share of nonzero values that may become zero or subnormal; 0.5 unless given: up to that, underflow "
        "adds no more error than rounding does",
    )
    add("--inference", action="store_true", help="look at values only, not at gradients")
    return parser


def _say(text: str) -> None:
    say(f"{PROG}: {text}")


def run(options: Namespace) -> None:
    """Print the tables, and write the patch."""
    work = load_model(options, _say)
    name, policy = base_policy(options.policy, work, _say, runs=False)
    if options.loss_scale is not None and policy.lower_precision_fp not in SCALED_DTYPES:
        raise OptionError(f"--loss-scale is for float16; policy {name!r} computes in {policy.lower_precision_fp}")
    evidence = gather(work, policy, not options.inference)
    unseen = {sample.place for sample in evidence.unseen} - {sample.place for sample in evidence.samples}
    if unseen:
        words = ", ".join(sorted(f"{short_op(place.op)} in {place.module or 'the root module'}" for place in unseen))
        _say(f"not watched, because no batch took its branch or it is inside an autograd.Function: {words}")
    limits = Limits(Format.of_name(policy.lower_precision_fp), _shift(options, policy, evidence), options.underflow)
    rules = _rules(evidence, limits, policy)
    scaled = policy.lower_precision_fp in SCALED_DTYPES and not options.inference
    head = list(_head(name, work, evidence, limits, scaled))
    notice(summary(evidence.samples, limits))
    if evidence.scaled:
        notice(f"\n{fp8_summary(evidence.scaled, limits)}")
    _say(f"{len(rules)} rules proposed" if rules else "everything fits: no rule is needed")
    _say(NONFINITE)
    text = patch_text(name, policy, rules, head, 2.0**limits.shift if scaled else None, options.output)
    if evidence.stopped:
        raise SoFar(text)
    write_text(text, options.output)


def _rules(evidence: Evidence, limits: Limits, policy: Policy) -> list[CastRule]:
    """Return rules for 16 bits where operands in fp8 do not fit, then those for float32 where values do not."""
    places = {raised: [s.place for s in evidence.samples if s.raised is raised] for raised in (False, True)}
    troubles = [trouble for sample in evidence.samples if not sample.raised for trouble in limits.troubles(sample)]
    wide = {trouble.place for trouble in troubles}
    of_fp8 = [t for scaled in evidence.scaled for t in limits.fp8_troubles(scaled) if t.place not in wide]
    # A rule for a module is for the modules inside too: it must not lower what the policy has in float32 there.
    troubles += [trouble for trouble in of_fp8 if _holds(trouble.place, places[True])]
    of_fp8 = [trouble for trouble in of_fp8 if not _holds(trouble.place, places[True])]
    taken = [rule.id for rule in policy.rules]
    rules = rules_for(of_fp8, places[False] + places[True], taken, Category.LOWER_PRECISION_FP)
    return rules + rules_for(troubles, places[False], taken + [rule.id for rule in rules])


def _holds(place: ModuleOp, others: Collection[ModuleOp]) -> bool:
    """Whether one of ``others`` is the same op inside the module of ``place``."""
    inside = f"{place.module}." if place.module else ""
    return any(other.op == place.op and other.module.startswith(inside) for other in others)


def _shift(options: Namespace, policy: Policy, evidence: Evidence) -> int:
    if policy.lower_precision_fp not in SCALED_DTYPES or options.inference:
        return 0
    if options.loss_scale is not None:
        return exponent(options.loss_scale)
    init_scale = (policy.loss_scale or LossScale()).init_scale
    shift = fitting_shift(evidence.samples, init_scale)
    if shift < exponent(init_scale):
        _say(f"the loss scale is lowered from {init_scale:g} to {2.0**shift:g}, so that no gradient overflows")
    return shift


def _head(name: str, work: Workload, evidence: Evidence, limits: Limits, scaled: bool) -> Iterator[str]:
    yield f"What {work.file} needs beyond {name}, from {plural(evidence.batches, 'batch', 'batches')}, run in float32."
    values = sum(sample.forward.count for sample in evidence.samples if not sample.raised)
    graphs = plural(evidence.graphs, "graph")
    yield f"{values} values that {name} puts into {limits.format.name} were checked, in {graphs}."
    yield f"Rules are for values that overflow, and where more than {share(limits.underflow)} of them underflow."
    if evidence.scaled:
        products = plural(len({operand.place for operand in evidence.scaled}), "product")
        yield f"{products} in fp8: rules for 16 bits where more than {share(limits.underflow)} of an operand underflow."
    if scaled:
        yield f"Gradients were multiplied by the loss scale {2.0**limits.shift:g} before the check."
