"""``fxamp-policy``: check policy files, show them merged, and explain what they decide.

Each subcommand is a separate module, imported on demand; list, show and explain import no torch.
"""

from collections.abc import Sequence

from fxamp.tools.common.subcommands import Subcommands, dispatch

#: A module has its ``parser(prog)``, and ``run(options)``, which may return 1.
_SUBCOMMANDS: Subcommands = {
    "list": ("fxamp.tools.policy.list", "list the shipped policies: where each runs, and what it does"),
    "check": ("fxamp.tools.policy.check", "validate policy files: all mistakes at once, each with its line"),
    "show": ("fxamp.tools.policy.show", "print a resolved policy, with the place where each line was written"),
    "explain": ("fxamp.tools.policy.explain", "say which rule decides a call, and why the others do not"),
    "calibrate": (
        "fxamp.tools.policy.calibrate.command",
        "propose a patch from the ranges of values and gradients",
    ),
    "bisect": (
        "fxamp.tools.policy.bisect.command",
        "find the fewest modules or rules to widen for a tolerance",
    ),
    "fit": ("fxamp.tools.policy.fit.command", "find the policy with which a step fits a GPU's memory"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``fxamp-policy SUBCOMMAND [option ...]``; returns the exit status, 2 after a mistake in the command."""
    return dispatch("fxamp-policy", _SUBCOMMANDS, arguments, lambda subcommand, options: subcommand.run(options))


if __name__ == "__main__":
    raise SystemExit(main())
