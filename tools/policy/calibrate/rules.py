"""Turn places with troubles into few readable rules: similar siblings share a glob, equal ops share a rule."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fxamp.graph_text.model import short_op
from fxamp.policy import CastRule, Category
from fxamp.policy.model.module_globs import covers_module
from fxamp.tools.policy.calibrate.troubles import Trouble
from fxamp.tools.policy.places import ModuleOp

#: A part of a module path that is a number.
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def rules_for(
    troubles: Sequence[Trouble], places: Iterable[ModuleOp], taken: Iterable[str], cast: Category = Category.FP32
) -> list[CastRule]:
    """Return rules with ``cast`` for the places of ``troubles``; ``places`` are all places of the program.

    A glob with ``*`` is used only where it covers no place that the paths themselves would not. ``taken`` are the ids
    of the policy's own rules. Deterministic: in the order of ``places``.
    """
    known = list(dict.fromkeys(places))
    bad = [place for place in known if any(trouble.place == place for trouble in troubles)]
    ops_of: dict[str, dict[str, None]] = defaultdict(dict)
    for op in dict.fromkeys(place.op for place in bad):
        paths = [place.module for place in bad if place.op == op]
        for glob in globs_for(paths, [place.module for place in known if place.op == op]):
            ops_of[glob][op] = None
    # A rule without a module is for the op everywhere: no glob matches only the root's own calls.
    everywhere = ops_of.pop("", {})
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for glob, ops in ops_of.items():
        groups[tuple(op for op in ops if op not in everywhere)].append(glob)
    ids = set(taken)
    rules = [_rule(tuple(everywhere), (), troubles, ids, cast)] if everywhere else []
    return rules + [_rule(ops, tuple(globs), troubles, ids, cast) for ops, globs in groups.items() if ops]


def globs_for(paths: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return globs that cover the module ``paths``, and no other path of ``known`` that these do not cover."""
    covered = {path for path in known if any(covers_module(exact(w, known), path) for w in paths if w)}
    globs: dict[str, None] = {}
    for path in paths:
        if any(glob and covers_module(glob, path) for glob in globs):
            continue
        fitting = (g for g in _wider(path, known) if all(p in covered for p in known if covers_module(g, p)))
        globs[next(fitting, exact(path, known) if path else "")] = None
    return list(globs)


def exact(path: str, known: Sequence[str]) -> str:
    """Return a glob for the module at ``path`` and everything inside; anchored at the root if it would match others."""
    inside = all(other == path or other.startswith(f"{path}.") for other in known if covers_module(path, other))
    return path if inside else f".{path}"


def _wider(path: str, known: Sequence[str]) -> Iterator[str]:
    """Yield globs with ``*`` for all numbers in the path, then for each one; only globs that cover a sibling."""
    numbers = list(NUMBER.finditer(path))
    if not numbers:
        return
    spans = [tuple(number.span() for number in numbers), *((number.span(),) for number in numbers)]
    for chosen in dict.fromkeys(spans):
        glob = path
        for start, end in reversed(chosen):
            glob = f"{glob[:start]}*{glob[end:]}"
        for anchored in (glob, f".{glob}"):
            if sum(covers_module(anchored, other) for other in known) > 1:
                yield anchored


def _rule(
    ops: tuple[str, ...], globs: tuple[str, ...], troubles: Sequence[Trouble], taken: set[str], cast: Category
) -> CastRule:
    mine = [
        t for t in troubles if t.place.op in ops and (not globs or any(covers_module(g, t.place.module) for g in globs))
    ]
    worst = _worst(mine)
    name = _id("-and-".join(worst), globs[0] if globs else short_op(ops[0]), taken)
    places = len({trouble.place for trouble in mine})
    reasons = "; ".join(
        f"{short_op(t.place.op)} in {t.place.module or 'the root module'}: {t.words}" for t in worst.values()
    )
    many = f"{places} places, worst " if places > 1 else ""
    return CastRule(name, cast, tuple(map(short_op, ops)), why=f"Calibrated: {many}{reasons}.", modules=globs)


def _worst(troubles: Sequence[Trouble]) -> Mapping[str, Trouble]:
    """Return the worst trouble of each kind."""
    worst: dict[str, Trouble] = {}
    for trouble in sorted(troubles, key=lambda t: (t.kind, -t.share)):
        worst.setdefault(trouble.kind, trouble)
    return worst


def _id(kind: str, where: str, taken: set[str]) -> str:
    base = re.sub(r"-+", "-", f"{kind}-{re.sub(r'[^A-Za-z0-9_]+', '-', where)}").strip("-")
    name, number = base, 2
    while name in taken:
        name, number = f"{base}-{number}", number + 1
    taken.add(name)
    return name
