"""fxamp-policy check: report every mistake of policy files, as FILE:LINE: MESSAGE."""

from collections.abc import Sequence
from importlib.util import find_spec

from fxamp.policy.file.load import files_of, mistakes_of
from fxamp.tools.common.command_line import Parser, guarded
from fxamp.tools.common.output import notice, put
from fxamp.tools.policy.unknown_ops import UnknownOps, unknown_ops

PROG = "fxamp-policy check"


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand; returns 0, or 1 if there are mistakes, or 2 if a file does not exist."""
    given = _parser().parse_args(arguments)
    found: list[bool] = []
    status = guarded(PROG, lambda: found.append(_check(given.files, given.part)))
    return status or int(any(found))


def _parser() -> Parser:
    parser = Parser(
        PROG, "Validate policy files and what they extend. Exit status: 0, 1 if there are mistakes, else 2."
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a path to a .toml file, or a built-in name")
    parser.add_argument(
        "--part", action="store_true", help="the files are tables for others to extend: they need not be whole policies"
    )
    return parser


def _check(files: Sequence[str], part: bool) -> bool:
    found = {name: mistakes_of(name, part) for name in files}
    unknown = _unknown_ops([name for name, mistakes in found.items() if not mistakes])
    for name, ops in unknown.items():
        found[name] = list(ops.mistakes)
    for note in dict.fromkeys(note for ops in unknown.values() for note in ops.notes):
        notice(f"{PROG}: {note}")
    seen = list(dict.fromkeys(mistake for mistakes in found.values() for mistake in mistakes))
    for mistake in seen:
        put(mistake)
    for name, mistakes in found.items():
        if not mistakes:
            put(f"{name}: no mistakes")
    return bool(seen)


def _unknown_ops(files: Sequence[str]) -> dict[str, UnknownOps]:
    """Return what the installed torch says of the ops of each policy or table."""
    if find_spec("torch") is None:
        notice(f"{PROG}: torch is not installed, so the names of ops were not looked up")
        return {}
    from fxamp.torch_private import operator_names

    names = operator_names()
    return {name: unknown_ops(files_of(name), names) for name in files}
