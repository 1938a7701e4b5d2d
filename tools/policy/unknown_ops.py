"""The ops, and their arguments, that a policy's rules name and that the installed torch does not have."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from fxamp.errors import nearest
from fxamp.policy import Rule
from fxamp.policy.file.lines import index_lines
from fxamp.policy.file.parse import read
from fxamp.policy.file.paths import shown
from fxamp.policy.model.comparisons import holds, installed_torch_version
from fxamp.policy.model.op_names import covers, is_glob, spellings

#: The maximum number of mistakes that name the nearest op, which takes a search.
_SEARCHES = 50


@dataclass(frozen=True)
class UnknownOps:
    """Lines ``file:line: message``: of ops and arguments that do not exist, and of ops in libraries not loaded here."""

    mistakes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def unknown_ops(files: Collection[Path], names: Collection[str]) -> UnknownOps:
    """Look the ops that the rules of ``files`` name up in ``names``, the full names of all ops, and their arguments.

    The files have no other mistakes. Rules for other versions of torch than the installed one are left out.
    """
    from fxamp.passes.shared.rule_arguments import unknown_arguments  # which imports torch

    libraries = {name.partition("::")[0] for name in names}
    packets = {name.partition(".")[0] for name in names}
    mistakes, notes = [], []
    rules = [pair for file in files for pair in _rules(file)]
    for place, op in (named for rule, at in rules for named in _ops(rule, at)):
        library = op.partition("::")[0]
        if not is_glob(library) and library not in libraries:
            notes.append(f"{place}: {op!r} was not looked up: no library {library!r} is loaded here")
        elif is_glob(op):
            if not any(covers(op, name) for name in names):
                mistakes.append(f"{place}: {op!r} covers no op of the installed torch")
        elif spellings(op)[0] not in names and op not in packets:
            near = (packets if "." not in op else names) if len(mistakes) < _SEARCHES else ()
            hint = nearest(op, [name for name in near if name.startswith(f"{library}::")])
            mistakes.append(f"{place}: the installed torch has no op {op!r}{hint}")
    mistakes += [f"{at(*path)}: {mistake}" for rule, at in rules for path, mistake in unknown_arguments(rule)]
    return UnknownOps(tuple(mistakes), tuple(notes))


def _rules(file: Path) -> Iterator[tuple[Rule, Callable[..., str]]]:
    """Yield the rules of ``file`` for this torch, each with a function that returns the place of one of its keys."""
    lines = index_lines(file.read_text(encoding="utf-8"))
    for at, rule in enumerate(read(file).rules):
        if isinstance(rule, Rule) and (rule.torch is None or holds(rule.torch, installed_torch_version())):
            yield rule, lambda *key, at=at: f"{shown(file)}:{lines.line(('rule', at, *key))}"


def _ops(rule: Rule, at: Callable[..., str]) -> Iterator[tuple[str, str]]:
    for key in ("ops", "read_by"):
        for item, op in enumerate(getattr(rule, key, ())):
            yield at(key, item), op
