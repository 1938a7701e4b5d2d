"""The text of fxamp-policy explain: which rule decides a call, and why the other rules do not."""

from collections.abc import Iterator
from dataclasses import replace

from fxamp.errors import nearest
from fxamp.policy import Policy, Rule, Site
from fxamp.policy.model.op_names import is_glob


def explain(policy: Policy, site: Site) -> str:
    """Return the text for one call; if an op has rules for single overloads only, one text for each of these."""
    sites = [site]
    if not policy.ruling(site).rule and "." not in site.op:
        sites = [replace(site, op=op) for op in _overloads(policy, site.op)] or [site]
    return "\n\n".join("\n".join(_lines(policy, each)) for each in sites)


def _lines(policy: Policy, site: Site) -> Iterator[str]:
    yield f"{site.op} in the {site.region}, policy {policy.name}"
    ruling = policy.ruling(site)
    default = policy.default_rule if site.region == "forward" else None
    if ruling.rule is not None:
        yield from _rule("decides", ruling.rule, ruling.rule.why)
    elif default is not None:
        yield from _rule("decides", default, default.why)
    else:
        yield f"  no rule covers it: {_UNCOVERED[site.region]}{_hint(policy, site)}"
    for lost in reversed(ruling.lost):
        yield from _rule("lost", lost, "overridden: the last rule that covers a call decides")
    for passed, objection in reversed(ruling.passed_over):
        yield from _rule("unknown" if objection.unknown else "kept out", passed, objection.why)


_UNCOVERED = {"forward": "it follows its inputs", "backward": "it runs in the dtypes that follow from its forward"} | {
    "kept": "its result is kept as it is"
}


def _rule(label: str, rule: Rule, why: str) -> Iterator[str]:
    yield f"  {label:<8}  {rule.id}: {rule.asks}  ({rule.origin or 'made in Python'})"
    if why:
        yield f"            {why}"
    for name, dtype in dict(rule.inputs).items():
        yield f"            argument {name}: {dtype}"


def _named(policy: Policy) -> list[str]:
    return [op for rule in policy.rules for op in rule.ops if not is_glob(op)]


def _overloads(policy: Policy, packet: str) -> list[str]:
    return list(dict.fromkeys(op for op in _named(policy) if op.partition(".")[0] == packet))


def _hint(policy: Policy, site: Site) -> str:
    known = {name for op in _named(policy) for name in (op, op.partition(".")[0])} - {site.op}
    return "" if policy.ruling(site).passed_over else nearest(site.op, known)
