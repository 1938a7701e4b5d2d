"""The ops, and their arguments, that a policy's rules name and that the installed torch does not have."""

import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxamp.errors import nearest
from fxamp.policy import Rule
from fxamp.policy.file.lines import index_lines
from fxamp.policy.file.parse import read
from fxamp.policy.file.paths import shown
from fxamp.policy.model.comparisons import holds, installed_torch_version
from fxamp.policy.model.op_names import canonical, covers, is_glob, spellings

#: Only so many mistakes name the nearest op, which is a search.
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
    libraries = {name.partition("::")[0] for name in names}
    packets = {name.partition(".")[0] for name in names}
    mistakes, notes = [], []
    for place, op in (named for file in files for named in _ops(file)):
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
    mistakes += [line for file in files for line in _unknown_arguments(file)]
    return UnknownOps(tuple(mistakes), tuple(notes))


def _ops(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the place and the canonical name of each op that a rule of ``file`` names, and that may exist here."""
    text = file.read_text(encoding="utf-8")
    rules: list[dict[str, Any]] = tomllib.loads(text).get("rule", [])
    lines = index_lines(text)
    for at, rule in enumerate(rules):
        if not _is_for_this_torch(rule.get("torch")):
            continue
        for key in ("ops", "read_by"):
            for item, op in enumerate(rule.get(key, [])):
                yield f"{shown(file)}:{lines.line(('rule', at, key, item))}", canonical(op)


def _unknown_arguments(file: Path) -> Iterator[str]:
    """Yield a line for each argument that a rule of ``file`` names and that its ops do not have, as compiling does."""
    from fxamp.passes.shared.rule_arguments import unknown_arguments  # which imports torch

    lines = index_lines(file.read_text(encoding="utf-8"))
    for at, rule in enumerate(read(file).rules):
        if isinstance(rule, Rule) and _is_for_this_torch(rule.torch):
            for path, mistake in unknown_arguments(rule):
                yield f"{shown(file)}:{lines.line(('rule', at, *path))}: {mistake}"


def _is_for_this_torch(condition: str | None) -> bool:
    return condition is None or holds(condition, installed_torch_version())
