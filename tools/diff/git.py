"""``fxamp-diff --git``: a driver for ``git diff``, which calls it for each changed file.

Git passes a path and, for each side, a file with its text, its hash and its mode (``/dev/null . .`` for a missing
side). The files that a policy extends are read from the work tree, relative to the policy's path there, because git
passes no others. Text that is not a policy, or that has mistakes, is compared line by line, as git itself would do. Git
treats any exit status but 0 as a failure of the driver.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import unified_diff
from pathlib import Path

from fxamp.errors import OptionError, PolicyError
from fxamp.policy import Origin, Policy
from fxamp.tools.common.output import write_text
from fxamp.tools.common.terminal import look_of
from fxamp.tools.diff.result import compare
from fxamp.tools.diff.sides import Side, load_table, resolved
from fxamp.tools.diff.text import text_lines

_NONE = "/dev/null"
_USE = "accepted: git's PATH OLD-FILE OLD-HEX OLD-MODE NEW-FILE NEW-HEX NEW-MODE; set it as diff.fxamp.command in git"


def drive(arguments: Sequence[str]) -> None:
    """Print the difference for the arguments that git passes to external diff drivers.

    Raises OptionError if the arguments are not git's.
    """
    if len(arguments) == 1:
        return write_text(f"* unmerged: {arguments[0]}\n", None)
    if len(arguments) not in (7, 9):  # for a rename git adds the new path and a description
        raise OptionError(f"--git was called with {len(arguments)} arguments; {_USE}")
    path, old, new = arguments[0], arguments[1], arguments[4]
    after = arguments[7] if len(arguments) == 9 else path
    lines = [f"fxamp-diff {_named('a', path, old)} {_named('b', after, new)}", *_lines(path, old, after, new)]
    return write_text("".join(f"{line}\n" for line in lines), None)


def _named(side: str, path: str, file: str) -> str:
    return _NONE if file == _NONE else f"{side}/{path}"


def _lines(path: str, old: str, after: str, new: str) -> Iterator[str]:
    try:
        sides = [None if file == _NONE else _side(name, file) for name, file in ((path, old), (after, new))]
    except (PolicyError, UnicodeDecodeError) as error:
        if after.endswith(".toml"):
            yield from (f"# {line}" for line in str(error).splitlines())
        yield from _text_diff(path, old, after, new)
        return
    one, other = (side or _nothing(sides) for side in sides)
    yield from text_lines(compare(one, other), look_of(sys.stdout))


def _side(path: str, file: str) -> Side:
    """Return the policy or op table with the text of ``file`` and the work tree path ``path``."""
    text, place = Path(file).read_text(encoding="utf-8"), Path(path)

    def after(settings: str) -> Policy:
        return _moved_up(Policy.loads(settings + text, place.name), place.name, settings.count("\n"))

    with _beside(place):
        try:
            policy, missing = after(""), frozenset[str]()
        except PolicyError as error:
            policy, missing = load_table(after, error, {})
    return resolved(Side(replace(policy, name=place.stem), path, missing), None, None)


def _moved_up(policy: Policy, file: str, lines: int) -> Policy:
    """Return the policy with its line numbers of ``file`` reduced by ``lines``, the number of added first lines."""
    rules = []
    for rule in policy.rules:
        written = rule.origin
        here = written is not None and written.file == file
        rules.append(replace(rule, origin=Origin(file, written.line - lines)) if written and here else rule)
    return replace(policy, rules=tuple(rules))


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[None]:
    """Work in the folder of ``path``, because files that a policy extends are searched in the working directory."""
    folder = path.parent
    with contextlib.chdir(folder) if folder.is_dir() else contextlib.nullcontext():
        yield


def _nothing(sides: Sequence[Side | None]) -> Side:
    """Return an empty policy for the same device, to compare with a new or deleted policy."""
    there = next(side for side in sides if side is not None)
    bare = Policy(_NONE, there.policy.device, there.policy.lower_precision_fp)
    return Side(bare, _NONE, frozenset({"device", "lower_precision_fp", "outputs", "unlisted"}))


def _text_diff(path: str, old: str, after: str, new: str) -> Iterator[str]:
    before, now = (
        [] if file == _NONE else Path(file).read_bytes().decode("utf-8", "replace").splitlines() for file in (old, new)
    )
    yield from unified_diff(before, now, _named("a", path, old), _named("b", after, new), lineterm="")
