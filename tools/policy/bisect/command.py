"""``fxamp-policy bisect``: the smallest set of modules, or rules, to widen so that the error is within a tolerance.

With ``--region kept`` it looks for what must not be packed or recomputed for the backward.
"""

from argparse import Namespace
from collections.abc import Sequence

from fxamp.errors import ListingError, OptionError
from fxamp.policy import Policy
from fxamp.policy.model.site import KEPT
from fxamp.tools.common.command_line import Parser, number, one_of
from fxamp.tools.common.interrupt import so_far
from fxamp.tools.common.output import write_text
from fxamp.tools.common.progress import say
from fxamp.tools.policy.bisect.delta import hierarchical, is_minimal
from fxamp.tools.policy.bisect.report import best, head, hopeless, lines, rules
from fxamp.tools.policy.bisect.trials import Trials
from fxamp.tools.policy.bisect.units import (
    FLOAT32,
    KEPT_AS_IS,
    OUT_OF_FP8,
    ModuleTree,
    Unit,
    Widening,
    kept_rule_units,
    rule_units,
)
from fxamp.tools.policy.patch import NONFINITE, add_model, base_policy, load_model, patch_text
from fxamp.tools.policy.places import ModuleOp

PROG = "fxamp-policy bisect"

_TOLERANCE = number("a relative error; accepted: a number above 0, such as 1e-3", lambda value: value > 0)


def parser(prog: str) -> Parser:
    """Return the subcommand's options."""
    parser = Parser(
        prog,
        "Find the smallest set of modules, or of the policy's rules, that must be float32 for the relative error "
        "against float64 to be within a tolerance; for an fp8 policy, the set that must not run in fp8; with --region "
        "kept, the set whose values must be kept for the backward as the forward made them. MODEL.py "
        "defines model and batches (or inputs), and perhaps loss(output). The command runs it, and the model once "
        f"per trial. {NONFINITE}.",
    )
    add_model(
        parser,
        "the policy to start from; for the model's device DEVICE-float16 unless given, or with --region kept "
        "DEVICE-bfloat16-lean",
    )
    add = parser.add_argument
    add("--tolerance", metavar="T", type=_TOLERANCE, required=True, help="the largest relative error, in the 2-norm")
    add(
        "--region",
        type=one_of("forward", KEPT),
        default="forward",
        help="forward (default): what must be in a wider dtype; kept: what must not be packed or recomputed",
    )
    add("--by", type=one_of("modules", "rules"), default="modules", help="modules (default) or rules")
    add(
        "--measure",
        type=one_of("output", "gradient", "both"),
        help="the error of all outputs, of the gradient of the losses' sum, or of both (default; with --region kept "
        "the gradient's, because the outputs do not depend on it)",
    )
    add("--emulate", action="store_true", help="run another device's casts with the kernels of the model's device")
    return parser


def _say(text: str) -> None:
    say(f"{PROG}: {text}")


def run(options: Namespace) -> int:
    """Write the patch; returns 1 if float32 everywhere misses the tolerance too."""
    kept = options.region == KEPT
    measure = _measure(options.measure, kept)
    work = load_model(options, _say)
    start = options.policy or (f"{work.device()}-bfloat16-lean" if kept else None)
    name, policy = base_policy(start, work, _say, runs=True, emulate=options.emulate)
    if kept:
        _require_kept_rules(name, policy)
    batches = tuple(work.batches())
    if not batches:
        raise ListingError(f"{work.file}: batches holds no batch: there is nothing to measure; accepted: one or more")
    to = KEPT_AS_IS if kept else OUT_OF_FP8 if policy.has_fp8 else FLOAT32
    trials = Trials(work, batches, policy, options.tolerance, measure, to, _say)
    places = trials.places()
    if not places:
        raise ListingError(f"{work.file}: policy {name!r} {_nothing(trials.to, policy)}")
    with trials.shown, so_far(lambda: best(trials)):
        units = _search(trials, options.by, places)
    if units is None:
        return 1
    for line in (*lines(units, trials), NONFINITE):
        _say(line)
    text = patch_text(name, policy, rules(units, trials), head(units, trials, name), None, options.output)
    write_text(text, options.output)
    return 0


def _measure(measure: str | None, kept: bool) -> str:
    if kept and measure in ("output", "both"):
        raise OptionError(
            f"--measure {measure} with --region kept: outputs do not depend on how values are kept; accepted: gradient"
        )
    return measure or ("gradient" if kept else "both")


def _require_kept_rules(name: str, policy: Policy) -> None:
    if not policy.has_rules_for(KEPT):
        raise OptionError(
            f"--region kept: policy {name!r} has no rules for what is kept for the backward; accepted: a policy that "
            f"has some, such as '{policy.device}-{policy.lower_precision_fp}-lean'"
        )


def _nothing(to: Widening, policy: Policy) -> str:
    if to is KEPT_AS_IS:
        return "packs and recomputes nothing of what model keeps for the backward"
    return f"runs nothing of model in {'fp8' if to is OUT_OF_FP8 else policy.lower_precision_fp}"


def _rule_units(trials: Trials, places: Sequence[ModuleOp]) -> tuple[Unit, ...]:
    if trials.to is KEPT_AS_IS:
        return kept_rule_units(trials.policy, trials.packed())
    return rule_units(trials.policy, places)


def _search(trials: Trials, by: str, places: Sequence[ModuleOp]) -> tuple[Unit, ...] | None:
    """Return the minimal set, verified; None, with a message, if all units together miss the tolerance."""
    tree = ModuleTree(places)
    every = (tree.root,) if by == "modules" else _rule_units(trials, places)
    if trials.passes(()):
        return ()
    if not trials.passes(every):
        _say(hopeless(trials, every, by))
        return None
    units = hierarchical(every, tree.parts, trials.passes)
    minimal = is_minimal(units, trials.passes)
    assert minimal, "ddmin gives minimal sets"
    return units
