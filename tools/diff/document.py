"""A comparison as parts, which every format for people writes in order, each in its own way."""

from collections.abc import Iterator

from fxamp.tools.common.formatting import plural
from fxamp.tools.diff.part import Cells, Part, Shape, change, titles
from fxamp.tools.diff.result import Comparison
from fxamp.tools.diff.words import SIGNS, groups, ops_counted, rule_text, value, written_at


def parts(comparison: Comparison) -> Iterator[Part]:
    """Yield the parts of the whole comparison."""
    yield from policy_parts(comparison)
    for effect in comparison.effects:
        from fxamp.tools.diff.effect_parts import effect_parts

        yield from effect_parts(effect)
    for cost in comparison.costs:
        yield Part(remarks=list(cost.lines()), verbatim=True)
    for numbers in comparison.runs:
        from fxamp.tools.diff.numbers_parts import numbers_parts

        yield from numbers_parts(numbers)


def policy_parts(comparison: Comparison) -> Iterator[Part]:
    """Yield the settings, the rules and the ops that differ, if there are any."""
    settings = setting_rows(comparison)
    if settings:
        yield Part("", titles("", "setting", "old", "new"), settings, Shape("marks", change))
    rules = [(SIGNS[one.kind], one.id, rule_text(one), written_at(one)) for one in comparison.diff.rules]
    if rules:
        layout = titles("", "rule", "change", "written at")
        yield Part("rules", layout, rules, Shape("marks", _with_place), folds=True, prose=["change"])
    ops = [
        (group.heading if at == 0 else "", label, ", ".join(items))
        for group in groups(comparison.diff.ops)
        for at, (label, items) in enumerate(group.lines)
    ]
    if ops:
        title = f"{plural(ops_counted(comparison.diff.ops), 'op')} decided differently"
        names = ("decision", "rule", "concerns")
        yield Part(title, titles(*names), ops, Shape("groups"), folds=True, prose=names)


def setting_rows(comparison: Comparison) -> list[Cells]:
    """Return the settings that differ: mark, key, old and new value."""
    marked = [("~", one.key, one) for one in comparison.settings]
    marked += [("!", f"loss_scale.{one.key}", one) for one in comparison.loss_scale]
    return [(sign, key, value(one.old), value(one.new)) for sign, key, one in marked]


def _with_place(text: str, place: str) -> str:
    return f"{text}  [{place}]" if place else text
