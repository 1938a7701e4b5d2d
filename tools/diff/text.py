"""``--format text``: marked lines for settings and rules, and the ops that are decided differently."""

import textwrap
from collections.abc import Iterator

from fxamp.tools.common.formatting import plural
from fxamp.tools.common.table import printable
from fxamp.tools.common.terminal import Look
from fxamp.tools.diff.result import Comparison
from fxamp.tools.diff.words import groups, ops_counted, rule_rows, setting_rows, verdict

#: ANSI colours of the marks.
_COLOURS = {"+": "32", "-": "31", "~": "33", "!": "35"}

#: The width of lists if there is no terminal.
_WIDTH = 120

_INDENT = "    "


def text_lines(comparison: Comparison, look: Look) -> Iterator[str]:
    """Yield the lines of the whole comparison."""
    yield printable(f"--- {comparison.old.about}")
    yield printable(f"+++ {comparison.new.about}")
    yield from _section("", list(_settings(comparison, look)))
    yield from _section("rules", list(_rules(comparison, look)))
    yield from _section(
        f"{plural(ops_counted(comparison.diff.ops), 'op')} decided differently", list(_ops(comparison, look))
    )
    for effect in comparison.effects:
        from fxamp.tools.diff.effect_text import effect_lines

        yield ""
        yield from effect_lines(effect, look)
    for cost in comparison.costs:
        yield ""
        yield from cost.lines()
    for numbers in comparison.runs:
        from fxamp.tools.diff.numbers_text import numbers_lines

        yield ""
        yield from numbers_lines(numbers, look)
    yield ""
    yield verdict(comparison)


def _section(title: str, lines: list[str]) -> Iterator[str]:
    if not lines:
        return
    yield ""
    if title:
        yield title
    yield from lines


def _settings(comparison: Comparison, look: Look) -> Iterator[str]:
    rows = setting_rows(comparison)
    longest = max((len(key) for _, key, _, _ in rows), default=0)
    for sign, key, old, new in rows:
        yield from _marked(sign, f"{key:<{longest}}", f"{old} -> {new}", look)


def _rules(comparison: Comparison, look: Look) -> Iterator[str]:
    rows = rule_rows(comparison)
    longest = max((len(name) for _, name, _, _ in rows), default=0)
    for sign, name, text, where in rows:
        yield from _marked(sign, f"{name:<{longest}}", f"{text}  [{where}]" if where else text, look)


def _ops(comparison: Comparison, look: Look) -> Iterator[str]:
    for group in groups(comparison.diff.ops):
        yield from _wrapped("  ", group.heading, look, more=_INDENT)
        longest = max(len(label) for label, _ in group.lines)
        for label, items in group.lines:
            yield from _wrapped(f"{_INDENT}{label:<{longest}}  ", ", ".join(items), look)


def _marked(sign: str, label: str, text: str, look: Look) -> Iterator[str]:
    first, *rest = _wrapped(f"{sign} {label}  ", text, look)
    colour = look.colour and _COLOURS[sign]
    yield f"\x1b[{colour}m{first[: len(label) + 2]}\x1b[0m{first[len(label) + 2 :]}" if colour else first
    yield from rest


def _wrapped(label: str, text: str, look: Look, more: str | None = None) -> list[str]:
    """Return ``text`` after ``label``, wrapped; later lines are indented by ``more``, or to the width of ``label``."""
    width = look.width or _WIDTH
    longest = max(map(len, text.split()), default=0)
    if len(label) > len(_INDENT) * 2 and len(label) + longest > width:
        return [label.rstrip(), *_wrapped(_INDENT * 2, text, look)]
    lines = textwrap.wrap(
        printable(text),
        width,
        initial_indent=label,
        subsequent_indent=" " * len(label) if more is None else more,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [label.rstrip()]
