"""``fxamp.report``: what mixed precision did to a compiled model, as text and numbers."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

from tabulate import tabulate

from fxamp.argument_names import named_arguments
from fxamp.errors import OptionError
from fxamp.graph_text import Document, RuleRef
from fxamp.graph_text.totals import by_reason, totals_of
from fxamp.reports import GraphRecord
from fxamp.reports.break_reasons import ended_functions, skipped_functions
from fxamp.reports.nonfinite import NonFinite
from fxamp.reports.recompile_limits import REMEDIES, limited_functions
from fxamp.reports.registry import outside, records_of

_NOTHING = (
    "0 graphs: fxamp compiled none of it, so all of it runs unchanged. Either it has not been called yet, or Dynamo "
    "skipped it: calling a module of torch.nn itself compiles nothing; put it in your own module. A copy of a compiled "
    'model is not compiled, nor is a model before model.compile(backend="fxamp").'
)
_SKIPPED = "Functions that Dynamo skips, so that they run unchanged:"
_ENDED = "Dynamo ended the graph of a function before its first op, and skips what that function calls:"
_LIMITED = "Dynamo compiles no more graphs of these functions, and calls that fit none of their graphs run unchanged:"
_RIGHT = ("graph", "ops", "casts", "shared", "folded", "kept")

#: How many nodes a line names.
_NAMED = 4


@dataclass(frozen=True)
class Report:
    """The graphs of one compiled model or function; prints as a table, in a terminal and in a notebook.

    It lists the graphs that ran when the model was called, and those that read its parameters. ``outside`` names the
    parameters that no graph read: the code that uses them runs unchanged. ``skipped`` lists functions that Dynamo does
    not compile, with the reason: for example a graph break inside a loop. ``ended`` lists functions whose first graph
    was ended by a graph break, which explains a missing graph. ``limited`` lists functions for which Dynamo reached its
    recompile limit, with the number of calls that ran without casts since then.
    """

    graphs: tuple[GraphRecord, ...]
    outside: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    limited: tuple[str, ...] = ()

    @property
    def casts(self) -> int:
        """The number of inserted casts in all graphs together."""
        return sum(graph.casts for graph in self.graphs)

    @property
    def ops(self) -> int:
        """The number of calls of ATen ops in all graphs together, without the inserted casts."""
        return sum(graph.ops for graph in self.graphs)

    @property
    def breaks(self) -> tuple[str, ...]:
        """The reasons of all graph breaks, one per break."""
        return tuple(graph.ended for graph in self.graphs if graph.ended)

    @property
    def unmatched(self) -> tuple[RuleRef, ...]:
        """The rules, except those of the built-in files, that matched no op in any of the graphs."""
        if not self.graphs:
            return ()
        first, *rest = [graph.listing.unmatched for graph in self.graphs]
        return tuple(rule for rule in first if all(rule in others for others in rest))

    @property
    def nonfinite(self) -> tuple[NonFinite, ...]:
        """The first values that were not finite, by graph, in the order in which they were found.

        Empty without the option "nonfinite". Waits for the device.
        """
        return tuple(found for graph in self.graphs for found in graph.nonfinite)

    @property
    def document(self) -> Document:
        """Return every node of every graph with the decision made for it, as fxamp-show reads it from a dump."""
        return Document(tuple(graph.listing for graph in self.graphs))

    @property
    def kept(self) -> tuple[int | None, int | None]:
        """The bytes that all forwards save for their backwards, without and with the policy's rules for saved values.

        None if no graph has such rules, or a size is unknown.
        """
        values = [value for graph in self.graphs for value in graph.kept]
        return totals_of(values) if values else (None, None)

    def __str__(self) -> str:
        if not self.graphs:
            return "\n".join(self._nothing())
        table: str = tabulate(self._rows(), headers="keys", tablefmt="simple")
        return "\n\n".join([table, *("\n".join([title, *lines]) for title, lines in self._notes())])

    def _repr_html_(self) -> str:
        """Return the HTML for a notebook."""
        if not self.graphs:
            first, *rest = self._nothing()
            return f"<p>{escape(first)}</p><pre>{escape(chr(10).join(rest))}</pre>"
        align = ["right" if name in _RIGHT else "left" for name in self._rows()[0]]
        table: str = tabulate(self._rows(), headers="keys", tablefmt="html", colalign=align)
        notes = [f"<p>{escape(title)}</p><pre>{escape(chr(10).join(lines))}</pre>" for title, lines in self._notes()]
        return "".join([table, *notes])

    def _nothing(self) -> list[str]:
        if not self.skipped and not self.ended and not self.limited:
            return [_NOTHING]
        reasons = []
        if self.skipped:
            reasons += [_SKIPPED, *self._skips()]
        elif self.ended:
            reasons += [_ENDED, *(f"  {function}" for function in self.ended)]
        if self.limited:
            reasons += [_LIMITED, *self._limits()]
        return ["0 graphs: fxamp compiled none of it.", "", *reasons]

    def _skips(self) -> list[str]:
        return [f"  {function}" for function in self.skipped]

    def _limits(self) -> list[str]:
        return [*(f"  {function}" for function in self.limited), f"  {REMEDIES}"]

    def _rows(self) -> list[dict[str, Any]]:
        with_kept = any(graph.kept for graph in self.graphs)
        return [_row(number, graph, with_kept) for number, graph in enumerate(self.graphs)]

    def _notes(self) -> list[tuple[str, list[str]]]:
        """Return the notes below the table, each a title and lines."""
        numbered = list(enumerate(self.graphs))
        verbatim = [f"  graph {i}: {text}" for i, g in numbered for text in by_reason(g.verbatim, _NAMED)]
        breaks = [f"  after graph {i}: {g.ended}" for i, g in numbered if g.ended]
        breaks += [f"  before the first op: {function}" for function in self._without_graph()]
        notes = list(self._fp8())
        before, after = self.kept
        if before is not None and after is not None:
            notes.append(
                (f"Kept for the backward: {_size(before)} without rules for it, {_size(after)} with them.", [])
            )
        if verbatim:
            notes.append(("Left verbatim, in the dtypes they were captured with:", verbatim))
        if breaks:
            notes.append(("The program continues outside a graph (a graph break):", breaks))
        if self.skipped:
            notes.append((_SKIPPED, self._skips()))
        if self.limited:
            notes.append((_LIMITED, self._limits()))
        if self.outside:
            notes.append(("Parameters that no graph reads; the code that uses them runs unchanged:", self._outside()))
        if self.unmatched:
            rules = [f"  {rule.id} ({rule.origin or 'made in Python'})" for rule in self.unmatched]
            notes.append(("Rules that matched no op:", rules))
        notes += [("Not finite:", [str(found)]) for found in self.nonfinite]
        if len(self.graphs) > 1 or breaks:
            notes.append(("Code that is in none of these graphs runs unchanged, in its own dtypes.", []))
        return notes

    def _without_graph(self) -> list[str]:
        """Return the functions whose first graph a break ended before an op: no graph holds the break's reason."""
        known = [graph.ended for graph in self.graphs]
        return [function for function in self.ended if not any(function.split(": ", 2)[2] in text for text in known)]

    def _fp8(self) -> Iterator[tuple[str, list[str]]]:
        sums = [graph.totals for graph in self.graphs]
        counted = sum((Counter(total.fp8) for total in sums), Counter())
        out = [f"  graph {i}: {text}" for i, total in enumerate(sums) for text in by_reason(total.not_fp8, _NAMED)]
        if counted:
            yield "Products in fp8, by recipe:", [f"  {recipe}: {count}" for recipe, count in counted.items()]
        if out:
            yield "Products that run in 16 bits although a rule for fp8 names them:", out

    def _outside(self) -> list[str]:
        owners = Counter(name.rpartition(".")[0] or "the model itself" for name in self.outside)
        return [f"  {owner}: {count}" for owner, count in owners.items()]


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def _row(number: int, graph: GraphRecord, with_kept: bool) -> dict[str, Any]:
    dtypes = ", ".join(f"{dtype} {count}" for dtype, count in sorted(graph.ops_by_dtype.items()))
    after = totals_of(graph.kept)[1]
    kept_column = {"kept": "" if after is None else _size(after)} if with_kept else {}
    return {
        "graph": number,
        "policy": graph.policy,
        "because": graph.chosen,
        "ops": graph.ops,
        "ops by dtype": dtypes,
        "casts": graph.casts,
        "shared": graph.shared,
        "folded": graph.folded,
        **kept_column,
    }


@named_arguments
def report(compiled: Any) -> Report:
    """Report on a model or function that was compiled with backend "fxamp" and called at least once.

    ``compiled`` is the return value of torch.compile, or the module whose ``.compile()`` was called. Raises OptionError
    for anything that cannot be called.
    """
    if not callable(compiled):
        raise OptionError(
            f"report of {compiled!r}, of type {type(compiled).__name__}; accepted: what torch.compile returned, or a "
            "module whose .compile() was called"
        )
    reasons = tuple(skipped_functions(compiled)), tuple(ended_functions(compiled)), tuple(limited_functions(compiled))
    return Report(tuple(records_of(compiled)), tuple(outside(compiled)), *reasons)
