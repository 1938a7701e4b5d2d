"""``fxamp.report``: what mixed precision did to a compiled model, in words and numbers."""

from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from fxamp.backend.registry import records_of
from fxamp.pipeline import GraphRecord

_NOTHING = (
    "0 graphs: nothing of it was compiled by fxamp, so all of it runs as it is written. Either it has not been called "
    "yet, or Dynamo skipped it: calling a module of torch.nn itself compiles nothing, put it in a model of your own."
)


@dataclass(frozen=True)
class Report:
    """The graphs of one compiled model or function; prints as a table. What is in no graph ran as it is written."""

    graphs: tuple[GraphRecord, ...]

    @property
    def casts(self) -> int:
        """Inserted casts in all graphs together."""
        return sum(graph.casts for graph in self.graphs)

    @property
    def ops(self) -> int:
        """Calls of ATen ops in all graphs together, without the inserted casts."""
        return sum(graph.ops for graph in self.graphs)

    def __str__(self) -> str:
        if not self.graphs:
            return _NOTHING
        rows = [_row(number, graph) for number, graph in enumerate(self.graphs)]
        table: str = tabulate(rows, headers="keys", tablefmt="simple")
        kept = [f"  graph {i}: {name}: {why}" for i, g in enumerate(self.graphs) for name, why in g.verbatim.items()]
        if kept:
            table += "\n\nKept as captured, in the dtypes they were captured with:\n" + "\n".join(kept)
        if len(self.graphs) > 1:
            table += "\n\nWhat is in none of these graphs runs outside them, in the dtypes it is written for."
        return table


def _row(number: int, graph: GraphRecord) -> dict[str, Any]:
    dtypes = ", ".join(f"{dtype} {count}" for dtype, count in sorted(graph.ops_by_dtype.items()))
    return {
        "graph": number,
        "policy": graph.policy,
        "because": graph.chosen,
        "ops": graph.ops,
        "ops by dtype": dtypes,
        "casts": graph.casts,
        "shared": graph.shared,
        "folded": graph.folded,
    }


def report(compiled: Any) -> Report:
    """Report on a model or function that was compiled with backend "fxamp" and called at least once.

    ``compiled`` is what torch.compile returned, or the module whose ``.compile()`` was called.
    """
    return Report(tuple(records_of(compiled)))
