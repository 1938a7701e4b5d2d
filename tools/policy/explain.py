"""fxamp-policy explain: the rule that decides a call, the rules it overrides, and those whose conditions fail."""

import tomllib
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fxamp.errors import OptionError, nearest
from fxamp.policy import CastRule, Policy, Rule, Site, TensorFacts
from fxamp.policy.model.conditions import CHECKS, DTYPES
from fxamp.policy.model.op_names import canonical, is_glob
from fxamp.policy.model.rule import uncovered
from fxamp.policy.model.site import REGIONS, Value
from fxamp.tools.common.command_line import Parser, natural, one_of
from fxamp.tools.common.output import put
from fxamp.tools.policy.show import add_machine, resolved

PROG = "fxamp-policy explain"


def parser(prog: str) -> Parser:
    """Return the subcommand's options."""
    parser = Parser(prog, "Say which rule decides a call of an op, and why. Other facts are unknown.")
    add = parser.add_argument
    add("op", metavar="OP", help="an op's name, as policies write it: mm, aten.mm, sum.dim_IntList, mylib::op")
    add("--policy", metavar="P", required=True, help="a path to a .toml file, or a built-in name")
    add("--module", metavar="PATH", default="", help="the dotted path of the module that calls it")
    add(
        "--class", metavar="C", dest="classes", action="append", default=[], help="a module class around it; repeatable"
    )
    add(
        "--region",
        type=one_of(*REGIONS),
        default="forward",
        help="forward (default), backward, kept (how its result is saved for the backward), loss (in chunks), results",
    )
    add("--arg", metavar="A", dest="args", action="append", default=[], help="dim=-1, self.size=4096; repeatable")
    add("--reduces", metavar="N", type=natural, help="how many elements go into one result of a reduction")
    add("--elements", metavar="N", type=natural, help="how many elements a kept value has")
    add(
        "--read-by",
        metavar="OP",
        dest="readers",
        action="append",
        default=[],
        help="an op that reads the kept value; repeatable",
    )
    add_machine(parser)
    return parser


def run(options: Namespace) -> None:
    """Print the text for the call; raise OptionError for options that do not describe one."""
    try:
        site = _site(options)
    except ValueError as error:
        raise OptionError(str(error)) from error
    put(_explanation(resolved(PROG, options.policy, options), site))


def _site(options: Namespace) -> Site:
    """Return the call that the options describe; its other facts are unknown, not absent.

    Raises ValueError for unreadable arguments: ``dim=-1`` gives a value, ``self.size=4096`` a property of a tensor:
    dtype, rank, size or shape (``self.shape=2,3``).
    """
    values: dict[str, Value] = {}
    facts: dict[str, dict[str, Any]] = {}
    for text in options.args:
        name, _, written = text.partition("=")
        name, _, key = name.partition(".")
        if not written or not name:
            raise ValueError(f"--arg {text!r} is not an argument; accepted: such as dim=-1 or self.size=4096")
        if key:
            facts.setdefault(name, {})[key] = _fact(text, key, written)
        else:
            values[name] = _plain(written)
    args = values | {name: TensorFacts(**properties) for name, properties in facts.items()}
    return Site(
        canonical(options.op),
        options.module,
        tuple(options.classes),
        args,
        options.region,
        options.reduces,
        partial=True,
        elements=options.elements,
        readers=tuple(map(canonical, options.readers)),
    )


def _fact(text: str, key: str, written: str) -> Any:
    if key not in CHECKS:
        raise ValueError(f"--arg {text!r}: unknown {key!r}; accepted: {', '.join(CHECKS)}{nearest(key, CHECKS)}")
    if key == "dtype":
        if written not in DTYPES:
            accepted = f"accepted: {', '.join(DTYPES)}{nearest(written, DTYPES)}"
            raise ValueError(f"--arg {text!r}: unknown dtype {written!r}; {accepted}")
        return written
    numbers = written.strip("[]").split(",")
    if not all(number.strip().isdecimal() for number in numbers) or (key != "shape" and len(numbers) > 1):
        raise ValueError(f"--arg {text!r}: {written!r} is not a {key}; accepted: whole numbers")
    sizes = tuple(int(number) for number in numbers)
    return sizes if key == "shape" else sizes[0]


def _plain(written: str) -> Value:
    """Return a TOML value; anything else is a string, so quotes can be left out."""
    try:
        value = tomllib.loads(f"value = {written}")["value"]
    except tomllib.TOMLDecodeError:
        return written
    return tuple(value) if isinstance(value, list) else value if isinstance(value, (bool, int, float)) else str(value)


def _explanation(policy: Policy, site: Site) -> str:
    """Return the text for one call; if an op has rules for single overloads only, one text for each of these."""
    sites = [site]
    if not policy.ruling(site).rule and "." not in site.op:
        sites = [replace(site, op=op) for op in _overloads(policy, site.op)] or [site]
    return "\n\n".join("\n".join(_lines(policy, call)) for call in sites)


def _lines(policy: Policy, site: Site) -> Iterator[str]:
    yield f"{site.op} in the {site.region}, policy {policy.name}"
    ruling = policy.ruling(site)
    default = policy.default_rule if site.region == "forward" else None
    if ruling.rule is not None:
        yield from _rule("decides", ruling.rule, ruling.rule.why)
    elif default is not None:
        yield from _rule("decides", default, default.why)
    else:
        yield f"  no rule covers it: {uncovered(site.region)}{_hint(policy, site)}"
    for lost in reversed(ruling.lost):
        yield from _rule("lost", lost, "overridden: the last rule that covers a call decides")
    for rule, mismatch in reversed(ruling.inapplicable):
        yield from _rule("unknown" if mismatch.unknown else "kept out", rule, mismatch.why)


def _rule(label: str, rule: Rule, why: str) -> Iterator[str]:
    yield f"  {label:<8}  {rule.id}: {rule.asks}  ({rule.origin or 'made in Python'})"
    if why:
        yield f"            {why}"
    if isinstance(rule, CastRule):
        yield from (f"            argument {name}: {dtype}" for name, dtype in rule.inputs)


def _named(policy: Policy) -> list[str]:
    return [op for rule in policy.rules for op in rule.ops if not is_glob(op)]


def _overloads(policy: Policy, packet: str) -> list[str]:
    return list(dict.fromkeys(op for op in _named(policy) if op.partition(".")[0] == packet))


def _hint(policy: Policy, site: Site) -> str:
    known = {name for op in _named(policy) for name in (op, op.partition(".")[0])} - {site.op}
    return "" if policy.ruling(site).inapplicable else nearest(site.op, known)
