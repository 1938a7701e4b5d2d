"""fxamp-policy check: report every mistake of policy files, as FILE:LINE: MESSAGE."""

from argparse import Namespace
from collections.abc import Sequence
from importlib.util import find_spec

from fxamp.policy.file.load import files_of, mistakes_of
from fxamp.tools.common.command_line import Parser
from fxamp.tools.common.output import notice, put
from fxamp.tools.policy.unknown_ops import UnknownOps, unknown_ops

PROG = "fxamp-policy check"


def parser(prog: str) -> Parser:
    """Return the subcommand's options."""
    parser = Parser(
        prog, "Validate policy files and what they extend. Exit status: 0, 1 if there are mistakes, else 2."
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a path to a .toml file, or a built-in name")
    parser.add_argument(
        "--part", action="store_true", help="the files are tables for others to extend: they need not be whole policies"
    )
    return parser


def run(options: Namespace) -> int:
    """Print every mistake once; returns whether there are any."""
    mistakes = {name: mistakes_of(name, options.part) for name in options.files}
    unknown = _unknown_ops([name for name, lines in mistakes.items() if not lines])
    for name, ops in unknown.items():
        mistakes[name] = list(ops.mistakes)
    for note in dict.fromkeys(note for ops in unknown.values() for note in ops.notes):
        notice(f"{PROG}: {note}")
    for line in dict.fromkeys(line for lines in mistakes.values() for line in lines):
        put(line)
    for name, lines in mistakes.items():
        if not lines:
            put(f"{name}: no mistakes")
    return int(any(mistakes.values()))


def _unknown_ops(files: Sequence[str]) -> dict[str, UnknownOps]:
    """Return what the installed torch says about the ops of each policy or table."""
    if find_spec("torch") is None:
        notice(f"{PROG}: torch is not installed, so the names of ops were not looked up")
        return {}
    from fxamp.torch_private import operator_names

    names = operator_names()
    return {name: unknown_ops(files_of(name), names) for name in files}
