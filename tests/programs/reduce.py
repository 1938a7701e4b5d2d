"""Drop what a failing program does not need: statements, results, declarations.

Hypothesis shrinks what it drew, number by number; this works on the program itself, where one trial drops a statement
that many later ones do not read.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from programs.program import Block, Case, Program, Setting, Statement

T = TypeVar("T")

#: The kinds that are drawn under an ambient autocast alone.
_AMBIENT = {"function_left_whole", "transform"}


def reduce(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The smallest case found that still ``fails``; a case that cannot run counts as one that does not."""
    smaller = next((trial for trial in _trials(case) if fails(trial)), None)
    while smaller is not None:
        case = smaller
        smaller = next((trial for trial in _trials(case) if fails(trial)), None)
    return case


def _trials(case: Case) -> Iterator[Case]:
    program = case.program
    for setting in _plainer(case.setting):
        if setting.ambient == case.setting.ambient or _AMBIENT.isdisjoint(program.kinds()):
            yield replace(case, setting=setting)
    if program.border != Program.border:
        yield _with(case, border=Program.border)
    for results in _without_one(program.results):
        if results:
            yield _with(case, results=results)
    for statements in _smaller(program.statements):
        yield _with(case, statements=statements)
    for declarations in _without_one(program.declarations):
        yield _with(case, declarations=declarations)


def _plainer(setting: Setting) -> Iterator[Setting]:
    plain = Setting()
    for name in ("schedule", "scaled", "factor", "used", "ambient", "compiled", "watched"):
        if getattr(setting, name) != getattr(plain, name):
            yield replace(setting, **{name: getattr(plain, name)})


def _with(case: Case, **changes: object) -> Case:
    program: Program = replace(case.program, **changes)  # type: ignore[arg-type]
    return replace(case, program=program)


def _without_one(items: tuple[T, ...]) -> Iterator[tuple[T, ...]]:
    for i in reversed(range(len(items))):
        yield items[:i] + items[i + 1 :]


def _smaller(statements: tuple[Statement, ...]) -> Iterator[tuple[Statement, ...]]:
    """Without one statement, with one block dissolved into its body, or with one smaller body."""
    yield from _without_one(statements)
    for i, statement in enumerate(statements):
        if isinstance(statement, Block):
            if not statement.header.program.startswith("def "):
                yield statements[:i] + statement.body + statements[i + 1 :]
            for body in _smaller(statement.body):
                yield (*statements[:i], replace(statement, body=body), *statements[i + 1 :])
