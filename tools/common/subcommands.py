"""A command of subcommands, each a module that is imported when it is called."""

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType

from fxamp.errors import nearest
from fxamp.tools.common.command_line import guarded
from fxamp.tools.common.output import notice, put

#: Subcommand -> (its module, which has ``parser(prog)`` and ``run``; what it does).
Subcommands = Mapping[str, tuple[str, str]]


def dispatch(
    prog: str,
    subcommands: Subcommands,
    arguments: Sequence[str] | None,
    run: Callable[[ModuleType, Namespace], int | None],
) -> int:
    """Run ``PROG SUBCOMMAND [option ...]`` by ``run``; returns the exit status, 2 after a mistake in the command."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    lines = [f"  {name:12}{purpose}" for name, (_, purpose) in subcommands.items()]
    usage = "\n".join([f"usage: {prog} SUBCOMMAND [--help] [option ...]", "", "subcommands:", *lines])
    if words and words[0] in ("-h", "--help"):
        return guarded(prog, lambda: put(usage))
    if not words:
        notice(usage)
        return 2
    if words[0] not in subcommands:
        hint, accepted = nearest(words[0], subcommands), ", ".join(subcommands)
        notice(f"{prog}: unknown subcommand {words[0]!r}{hint}; accepted: {accepted}")
        return 2
    whole, modules = f"{prog} {words[0]}", list[ModuleType]()
    # Importing torch takes seconds, in which Ctrl-C may come.
    status = guarded(whole, lambda: modules.append(import_module(subcommands[words[0]][0])))
    if status:
        return status
    (module,) = modules
    options = module.parser(whole).parse_args(words[1:])
    return guarded(whole, lambda: run(module, options))
