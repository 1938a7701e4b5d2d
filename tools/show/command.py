"""``fxamp-show``: show what mixed precision does to a graph, and why; reads a dump, a model or an exported program."""

import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence

from fxamp.errors import ListingError, OptionError
from fxamp.graph_text.model import Document
from fxamp.tools.common.command_line import Parser, guarded, natural, one_of, positive
from fxamp.tools.common.output import notice, require_folder, write_text
from fxamp.tools.common.terminal import look_of
from fxamp.tools.show.select import Selection, select

PROG = "fxamp-show"
_SOURCE = "a graph as text, fx_graph_runnable.py, a .pt2, or a Python file with model and inputs"

#: What ``--sort`` accepts.
SORTS = ("bytes", "kept")

FORMATS = ("text", "json", "html", "model-explorer")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``fxamp-show``; returns 0, or 1 if ``--check`` found something, or 2 after a user's mistake."""
    options = _parser().parse_args(argv)
    problems: list[bool] = []
    status = guarded(PROG, lambda: problems.append(_show(options)))
    return status or int(any(problems))


def _parser() -> Parser:
    parser = Parser(PROG, "Show the dtype every op of a graph runs in, why, and what the casts cost; no device needed.")
    add = parser.add_argument
    add("source", metavar="GRAPH|MODEL.py", help=_SOURCE)
    add("--policy", metavar="P", help="apply a policy: a built-in name or a path to a .toml file")
    add("--device", metavar="D", help="the device to apply it for; this machine may lack it")
    add("--arch", metavar="A", help="the architecture of that device if it is an AMD GPU, such as gfx942")
    add("--format", type=one_of(*FORMATS), default="text", help=f"one of {', '.join(FORMATS)}; text unless given")
    add("--output", metavar="FILE", help="write to this file instead of standard output")
    add("--only", metavar="WHAT", help="casts, changed (ops whose dtype differs from the captured one) or a rule's id")
    add("--module", metavar="GLOB", help="only these modules and the modules inside them, such as 'h.0' or '*.attn'")
    add("--why", metavar="NODE", help="the whole chain of reasons for one node: NODE, BODY/NODE or GRAPH:NODE")
    add("--all", action="store_true", help="print every row, including those of sibling modules that are alike")
    add("--sort", metavar="WHAT", type=one_of(*SORTS), help="bytes: the largest casts first; kept: the largest kept")
    add("--kept", action="store_true", help="only what the forward keeps for the backward, the largest first")
    add("--check", action="store_true", help="print what looks wrong; exit status 1 if anything does")
    add("--graph", metavar="N", type=natural, help="only this graph of the input, counted from 0")
    add("--trust", action="store_true", help="allow running code of the input: a .pt2, or an fx_graph_runnable.py")
    add("--width", metavar="N", type=positive, help="fit the text to N columns; the terminal's unless given")
    return parser


def _show(options: Namespace) -> bool:
    """Do what the options say; returns whether ``--check`` found something."""
    _refuse_mixtures(options)
    require_folder(options.output, options.source, options.policy)
    document = _load(options)
    for warning in document.warnings:
        notice(f"{PROG}: warning: {warning}")
    selection = select(document, options.graph, options.only, options.module)
    text, problems = (
        _check(document, selection, options) if options.check else (_text(document, selection, options), False)
    )
    write_text(text, options.output)
    return problems


def _refuse_mixtures(options: Namespace) -> None:
    flags = {"--why": options.why is not None, "--check": options.check, "--kept": options.kept}
    accepted = {"--why": ("text",), "--check": ("text", "json"), "--kept": ("text",)}
    for name, formats in accepted.items():
        if flags[name] and options.format not in formats:
            raise OptionError(
                f"{name} cannot be written as {options.format}; accepted: --format {' or '.join(formats)}"
            )
    both = [name for name, chosen in flags.items() if chosen]
    if len(both) > 1:
        raise OptionError(f"{' and '.join(both)} exclude each other; give one of them")


def _load(options: Namespace) -> Document:
    from fxamp.tools.inputs.load import Request, load

    try:
        with_kept = options.kept or options.sort == "kept"
        request = Request(options.policy, options.device, options.trust, kept=with_kept, arch=options.arch)
        return load(options.source, request)
    except OSError as error:
        raise ListingError(f"{options.source}: {error.strerror or error}") from error


def _check(document: Document, selection: Selection, options: Namespace) -> tuple[str, bool]:
    from fxamp.tools.show.findings import finding_lines, findings

    results = findings(selection.graphs, selection.shows, rules=not selection.narrows)
    if options.format == "text":
        return _joined(finding_lines(results)), bool(results)
    from fxamp.tools.show.json_format import to_json

    return to_json(document, selection, results), bool(results)


def _text(document: Document, selection: Selection, options: Namespace) -> str:
    """Return the output in the chosen format; imports only that format's module."""
    title = options.source
    if options.why is not None:
        from fxamp.tools.show.why import why_lines

        return _joined(why_lines(selection.graphs, options.why))
    if options.format == "json":
        from fxamp.tools.show.json_format import to_json

        return to_json(document, selection)
    if options.format == "html":
        from fxamp.tools.show.html import html_page

        return html_page(selection.document(), title)
    if options.format == "model-explorer":
        from fxamp.tools.show.model_explorer import to_model_explorer

        return to_model_explorer(selection.document(), title)
    from fxamp.tools.show.text import View, kept_text, text_lines

    lines = kept_text if options.kept else text_lines
    look, view = (
        look_of(sys.stdout, options.width, options.output is not None),
        View(not options.all, options.sort or ""),
    )
    return _joined(lines(selection, title, look, view))


def _joined(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    raise SystemExit(main())
