"""The result of a bisection as text: for stderr, for the head of the patch, and for each rule's ``why``."""

from collections.abc import Iterator
from dataclasses import replace

from fxamp.policy import Rule
from fxamp.tools.common.formatting import plural
from fxamp.tools.policy.bisect.trials import Trials
from fxamp.tools.policy.bisect.units import KEPT_AS_IS, Unit, unit_rules

Units = tuple[Unit, ...]


def lines(units: Units, trials: Trials) -> Iterator[str]:
    """Yield the result, with a line for each unit: the error without it."""
    wide, tried = trials.to.words, plural(len(trials.known), "trial")
    yield f"the policy as it is: {trials.errors(())}; tolerance {trials.tolerance:g}"
    if not units:
        yield f"the policy meets the tolerance as it is: nothing needs {wide}; {tried}"
        return
    for unit in units:
        yield f"needs {wide}: {unit} (without it: {trials.errors(_without(units, unit))})"
    pieces = plural(len(units), "piece")
    yield f"with {pieces} in {wide}: {trials.errors(units)}; {_minimal(units)}; {tried}"


def head(units: Units, trials: Trials, name: str) -> Iterator[str]:
    """Yield the comment at the head of a patch for the policy called ``name``."""
    batches, count = plural(len(trials.batches), "batch", "batches"), plural(len(trials.known), "trial")
    yield f"What {trials.work.file} needs beyond {name} for a relative error of at most {trials.tolerance:g}."
    yield f"Against float64, over {batches}, by {count} with fixed seeds."
    yield f"{name} as it is: {trials.errors(())}."
    if not units:
        yield "It meets the tolerance as it is: no rule is needed."
        return
    yield f"As patched: {trials.errors(units)}; {_minimal(units)}."


def rules(units: Units, trials: Trials) -> list[Rule]:
    """Return the rules of ``found``; each rule's reason is the error without it."""
    with_all = f"with it: {trials.errors(units)}; wanted: at most {trials.tolerance:g}"
    return [
        replace(rule, why=f"Bisected; without this rule: {trials.errors(_without(units, unit))}; {with_all}.")
        for unit, rule in zip(units, unit_rules(trials.policy, units, trials.to), strict=True)
    ]


def best(trials: Trials) -> str:
    """Return the smallest set that met the tolerance in a trial; Ctrl-C may have come before it was minimal."""
    tried = plural(len(trials.known), "trial")
    good = [units for units, errors in trials.known.items() if errors.worst <= trials.tolerance]
    if not good:
        return f"{tried}: none met the tolerance {trials.tolerance:g} yet" if trials.known else ""
    units = min(good, key=len)
    named = "; ".join(sorted(map(str, units))) or "nothing"
    return f"{tried}; the smallest set so far in {trials.to.words}: {named}: {trials.known[units]}"


def hopeless(trials: Trials, every: Units, by: str) -> str:
    """Return why there is no such set: all units together miss the tolerance."""
    modules = by == "modules"
    lowers = "packs or recomputes" if trials.to is KEPT_AS_IS else "lowers"
    what = f"{trials.to.words} everywhere" if modules else f"{trials.to.words} for every rule that {lowers} something"
    hint = "a larger --tolerance" if modules else "a larger --tolerance, or --by modules"
    return (
        f"{what} misses the tolerance {trials.tolerance:g} too: {trials.errors(every)} (the policy as it is: "
        f"{trials.errors(())}); no set of {by} can be found; accepted: {hint}"
    )


def _minimal(units: Units) -> str:
    return (
        "without it the tolerance is missed" if len(units) == 1 else "without any one of them the tolerance is missed"
    )


def _without(units: Units, unit: Unit) -> Units:
    return tuple(other for other in units if other != unit)
