"""fxamp-policy show: print a resolved policy as one policy file, with comments on the origin of each line."""

from argparse import Namespace
from collections.abc import Sequence

from fxamp.tools.common.command_line import Parser, guarded
from fxamp.tools.common.output import write_text
from fxamp.tools.policy.place import add_place, resolved

PROG = "fxamp-policy show"


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand; returns the exit status: 0, or 2 after a user's mistake."""
    given = _parser().parse_args(arguments)
    return guarded(PROG, lambda: _show(given))


def _parser() -> Parser:
    parser = Parser(PROG, "Print a policy with all that it extends, and with the rules that hold here alone.")
    parser.add_argument("policy", metavar="P", help="a path to a .toml file, or a built-in name")
    add_place(parser)
    return parser


def _show(given: Namespace) -> None:
    policy = resolved(PROG, given.policy, given)
    head = f"# {policy.name}, with all that it extends, and with the rules that hold here alone"
    write_text(f"{head}\n{policy.dumps(origins=True)}")
