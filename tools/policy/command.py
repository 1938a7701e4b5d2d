"""``fxamp-policy``: check policy files, show what they come to, and explain what they decide.

Each subcommand is a separate module, imported on demand; list, show and explain import no torch.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

from fxamp.errors import nearest
from fxamp.tools.common.command_line import guarded
from fxamp.tools.common.output import notice, put

PROG = "fxamp-policy"

#: Subcommand -> (its module, what it does). A module has its ``parser()``, and ``run(options)``, which may return 1.
_SUBCOMMANDS: dict[str, tuple[str, str]] = {
    "list": ("fxamp.tools.policy.list", "list the shipped policies: where each runs, and what it does"),
    "check": ("fxamp.tools.policy.check", "validate policy files: all mistakes at once, each with its line"),
    "show": ("fxamp.tools.policy.show", "print a resolved policy, with the place where each line was written"),
    "explain": ("fxamp.tools.policy.explain", "say which rule decides a call, and what became of the others"),
    "calibrate": (
        "fxamp.tools.policy.calibrate.command",
        "propose a patch from the ranges of values and gradients",
    ),
    "bisect": (
        "fxamp.tools.policy.bisect.command",
        "find the fewest modules or rules to widen for a tolerance",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``fxamp-policy SUBCOMMAND [option ...]``; returns the exit status, 2 after a mistake in the command."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in ("-h", "--help"):
        return guarded(PROG, lambda: put(_usage()))
    if not words:
        notice(_usage())
        return 2
    if words[0] not in _SUBCOMMANDS:
        hint, accepted = nearest(words[0], _SUBCOMMANDS), ", ".join(_SUBCOMMANDS)
        notice(f"{PROG}: unknown subcommand {words[0]!r}{hint}; accepted: {accepted}")
        return 2
    subcommand = import_module(_SUBCOMMANDS[words[0]][0])
    options = subcommand.parser().parse_args(words[1:])
    return guarded(f"{PROG} {words[0]}", lambda: subcommand.run(options))


def _usage() -> str:
    lines = [f"  {name:10}{purpose}" for name, (_, purpose) in _SUBCOMMANDS.items()]
    return "\n".join([f"usage: {PROG} SUBCOMMAND [--help] [option ...]", "", "subcommands:", *lines])


if __name__ == "__main__":
    raise SystemExit(main())
