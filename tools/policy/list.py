"""fxamp-policy list: the shipped policies, a line each: where they run and what they do."""

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence

from fxamp.devices import DEVICES
from fxamp.policy import Policy
from fxamp.policy.file.builtin import built_in_names, find, variant_names
from fxamp.tools.common.command_line import Parser, guarded, one_of
from fxamp.tools.common.table import Column, render
from fxamp.tools.common.terminal import look_of

PROG = "fxamp-policy list"
_COLUMNS = (Column("policy"), Column("runs on"), Column("what it does", shorten="end", least=30))


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand; returns the exit status: 0, or 2 after a user's mistake."""
    given = _parser().parse_args(arguments)
    return guarded(PROG, lambda: _list(given))


def _parser() -> Parser:
    parser = Parser(PROG, "List the shipped policies: where each runs, and what it does.")
    parser.add_argument("--device", metavar="D", type=one_of(*DEVICES), help="only the policies of this device")
    return parser


def _list(given: Namespace) -> None:
    rows = [row for name in (*built_in_names(), *variant_names()) if (row := _row(name, given.device))]
    print("\n".join(render(_COLUMNS, rows, look_of(sys.stdout).width, shortened=["what it does"])))


def _row(name: str, device: str | None) -> tuple[str, ...] | None:
    policy = Policy.load(name)
    if device not in (None, policy.device):
        return None
    return name, " ".join(_conditions(policy)), purpose(name)


def _conditions(policy: Policy) -> Iterator[str]:
    yield policy.device
    if policy.capability:
        yield f"capability {policy.capability}"
    if policy.cpu_features:
        yield "with " + ", ".join(policy.cpu_features)


def purpose(name: str) -> str:
    """Return the description of a shipped policy: the comment at the start of its file, as one line."""
    lines = []
    for line in find(name).read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(lines)
