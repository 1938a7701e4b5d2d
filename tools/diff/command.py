"""``fxamp-diff``: compare two policies, and their effect on graphs and on a model's numbers."""

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from fxamp.errors import OptionError
from fxamp.tools.common.command_line import Parser, guarded, one_of, positive
from fxamp.tools.common.output import require_folder, write_text
from fxamp.tools.common.terminal import look_of
from fxamp.tools.diff.result import Comparison, compare
from fxamp.tools.diff.sides import PROG, Side, load_side

FORMATS = ("text", "json", "markdown")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``fxamp-diff``; returns 0 if the policies decide the same, 1 if not, 2 after a user's mistake."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--git"]:
        from fxamp.tools.diff.git import drive

        return guarded(PROG, lambda: drive(arguments[1:]))
    options = _parser().parse_args(arguments)
    return guarded(PROG, lambda: _diff(options))


def _parser() -> Parser:
    what = "Compare what two policies decide. Exit status 0: the same, 1: they differ, 2: a mistake. "
    parser = Parser(PROG, what + "With --git first: a diff driver for git, which calls it with its seven arguments.")
    add = parser.add_argument
    add("old", metavar="OLD", help="a built-in policy's name, or a path to a .toml file")
    add("new", metavar="NEW", help="the policy to compare it with")
    add("--device", metavar="D", help="the device to compare them for; each policy's own unless given")
    add("--torch", metavar="V", help="the version of torch to compare them for; the installed one unless given")
    add("--graph", metavar="FILE", action="append", default=[], help="show the effect on a graph that fxamp-show reads")
    add("--run", metavar="MODEL.py", help="run its model under both, and compare with float64: outputs and gradients")
    add("--cost", action="store_true", help="with --graph MODEL.py: count a training step on a GPU under both")
    add("--trust", action="store_true", help="allow running code of a graph's file: a .pt2, or an fx_graph_runnable.py")
    add("--format", type=one_of(*FORMATS), default="text", help=f"one of {', '.join(FORMATS)}; text unless given")
    add("--output", metavar="FILE", help="write to this file instead of standard output")
    add("--width", metavar="N", type=positive, help="fit the text to N columns; the terminal's unless given")
    return parser


def _diff(options: Namespace) -> int:
    """Do what the options say; returns 1 if the policies differ."""
    require_folder(options.output, options.old, options.new, options.run, *options.graph)
    old, new = (load_side(name, options.device, options.torch) for name in (options.old, options.new))
    require_folder(options.output, *old.policy.sources, *new.policy.sources)
    comparison = _executed(compare(old, new), options)
    write_text("".join(f"{line}\n" for line in _lines(comparison, options)), options.output)
    return int(not comparison.same)


def _executed(comparison: Comparison, options: Namespace) -> Comparison:
    """Add the effect on graphs and numbers, if requested; only these need torch."""
    if not (options.graph or options.cost) and options.run is None:
        return comparison
    for side in (comparison.old, comparison.new):
        _require_policy(side)
    if options.graph:
        from fxamp.tools.diff.effect import effects

        graphs = chain.from_iterable(
            effects(file, comparison.old, comparison.new, options.trust) for file in options.graph
        )
        comparison = replace(comparison, effects=tuple(graphs))
    if options.cost:
        from fxamp.tools.diff.cost import cost

        if not options.graph:
            raise OptionError("--cost needs a model: --graph MODEL.py")
        comparison = replace(
            comparison,
            costs=tuple(cost(file, comparison.old, comparison.new, options.format) for file in options.graph),
        )
    if options.run is not None:
        from fxamp.tools.diff.numbers import run_both

        comparison = replace(comparison, runs=(run_both(options.run, comparison.old, comparison.new),))
    return comparison


def _require_policy(side: Side) -> None:
    if side.open:
        raise OptionError(
            f"{side.source} is an op table, which does not say {' or '.join(sorted(side.open))}; "
            "accepted with --graph and --run: policies"
        )


def _lines(comparison: Comparison, options: Namespace) -> Iterator[str]:
    """Return the lines in the chosen format; imports only that format's module."""
    if options.format == "json":
        from fxamp.tools.diff.json_format import to_json

        return iter(to_json(comparison).removesuffix("\n").split("\n"))
    if options.format == "markdown":
        from fxamp.tools.diff.markdown import markdown_lines

        return markdown_lines(comparison)
    from fxamp.tools.diff.text import text_lines

    return text_lines(comparison, look_of(sys.stdout, options.width, options.output is not None))


if __name__ == "__main__":
    raise SystemExit(main())
