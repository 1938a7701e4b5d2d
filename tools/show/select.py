"""Select the graphs and entries to show: ``--graph``, ``--only``, ``--module``."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache

from fxamp.errors import OptionError, nearest
from fxamp.graph_text.model import Document, Entry, Listing
from fxamp.graph_text.totals import changed, is_op

#: Whether to keep an entry.
Keep = Callable[[Entry], bool]


@dataclass(frozen=True)
class Selection:
    """Graphs with their numbers in the document; ``scope`` accepts the entries to count, ``rows`` those to print."""

    graphs: tuple[tuple[int, Listing], ...]
    scope: Keep
    rows: Keep

    @property
    def scoped(self) -> bool:
        """Whether ``scope`` leaves anything out."""
        return self.scope is not everything

    @property
    def narrows(self) -> bool:
        """Whether anything is left out."""
        return self.scoped or self.rows is not everything

    def shows(self, entry: Entry) -> bool:
        """Whether an entry is printed."""
        return self.scope(entry) and self.rows(entry)

    def document(self) -> Document:
        """Return a document with only the selected graphs and rows; an op stays if one of its bodies has rows."""
        graphs = (listing for _, listing in self.graphs)
        return Document(tuple(_narrowed(listing, self.shows) if self.narrows else listing for listing in graphs))


def select(
    document: Document, graph: int | None = None, only: str | None = None, module: str | None = None
) -> Selection:
    """Return the selection of the options; raises OptionError with the nearest match if an option selects nothing."""
    graphs = tuple(enumerate(document.graphs))
    if graph is not None:
        if graph >= len(graphs):
            accepted = {0: "none, there are no graphs", 1: "0"}.get(len(graphs), f"0 to {len(graphs) - 1}")
            raise OptionError(f"--graph {graph}: there is no such graph; accepted: {accepted}")
        graphs = graphs[graph : graph + 1]
    entries = [entry for _, listing in graphs for _, entry in listing.walk()]
    scope = everything if module is None else _in_module(module, entries)
    rows = everything if only is None else _only(only, entries, [listing for _, listing in graphs])
    return Selection(graphs, scope, rows)


def everything(entry: Entry) -> bool:
    """Accept every entry."""
    return True


def _in_module(pattern: str, entries: list[Entry]) -> Keep:
    @cache
    def below(path: str) -> bool:
        return any(fnmatchcase(ancestor, pattern) for ancestor in _ancestors(path))

    modules = {entry.module for entry in entries}
    if not any(below(path) for path in modules):
        known = sorted({ancestor for path in modules for ancestor in _ancestors(path)} - {""})
        named = f"; accepted: one of {len(known)} module paths, or a glob" if known else "; no node names its module"
        raise OptionError(f"--module {pattern!r} matches no module{nearest(pattern, known)}{named}")
    return lambda entry: below(entry.module)


def _ancestors(path: str) -> Iterator[str]:
    """Return ``"h"``, ``"h.0"``, ``"h.0.attn"`` for ``"h.0.attn"``."""
    parts = path.split(".")
    return (".".join(parts[: count + 1]) for count in range(len(parts)))


def _only(what: str, entries: list[Entry], listings: list[Listing]) -> Keep:
    if what == "casts":
        return lambda entry: entry.is_cast
    if what == "changed":
        return lambda entry: is_op(entry) and changed(entry)
    rules = sorted({entry.rule.id for entry in entries if entry.rule is not None})
    if what in rules:
        return lambda entry: entry.rule is not None and entry.rule.id == what
    if any(what == rule.id for listing in listings for rule in listing.unmatched):
        raise OptionError(f"--only {what!r}: this rule decides no op here")
    accepted = ["casts", "changed", *rules]
    raise OptionError(
        f"--only {what!r}: no rule here has this id{nearest(what, accepted)}; accepted: {', '.join(accepted)}"
    )


def _narrowed(listing: Listing, keep: Keep) -> Listing:
    bodies = {name: _narrowed(body, keep) for name, body in listing.bodies.items()}
    filled = {name for name, body in bodies.items() if body.entries}
    entries = tuple(entry for entry in listing.entries if keep(entry) or filled.intersection(entry.bodies))
    return replace(listing, entries=entries, bodies=bodies)
