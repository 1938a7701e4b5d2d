"""Fold sibling modules that are alike: ``h.0 .. h.11 (12 alike)`` instead of twelve times the same rows.

Siblings are modules whose paths differ in one number. Their nodes are alike if their records are equal except for the
names of nodes, parameters and bodies, and that number. What a node reads must be at the same place of its block; from
outside the block, it must have the same type.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter

from fxamp.graph_text.model import Entry, Listing

#: Fields that contain names; they are compared separately. All others must be equal.
_TEXTS = ("call", "reason", "overruled", "inserted", "verbatim", "not_fp8", "symbol")
_NAMED = {"name", "target", "inputs", "module", "bodies", *_TEXTS}
_plain = attrgetter(*(field.name for field in fields(Entry) if field.name not in _NAMED))
_texts = attrgetter(*_TEXTS)

_WORDS = re.compile(r"\w+|\W+")


@dataclass(frozen=True)
class Alike:
    """``count`` sibling blocks that show the same, from module ``first`` to module ``last``.

    ``parts`` are the nodes of the first block, and blocks that are folded inside it.
    """

    first: str
    last: str
    count: int
    parts: tuple["Entry | Alike", ...]

    def entries(self) -> Iterator[tuple[Entry, int]]:
        """Yield the nodes of the first block, each with the number of its equals in all blocks."""
        for part, times in repeated(self.parts):
            yield part, times * self.count


def repeated(parts: Sequence[Entry | Alike]) -> Iterator[tuple[Entry, int]]:
    """Yield every node, each with the number of times that it stands for."""
    for part in parts:
        if isinstance(part, Alike):
            yield from part.entries()
        else:
            yield part, 1


def folded(listing: Listing, entries: Sequence[Entry]) -> list[Entry | Alike]:
    """Return ``entries``, nodes of ``listing`` in order, with sibling blocks that show the same folded into one."""
    return list(_Blocks(listing, entries).parts(0, len(entries), 0))


@dataclass(frozen=True)
class _Block:
    """The nodes from ``start`` to ``stop`` of a graph; ``path``: the module whose number may differ, ``""`` if none."""

    listing: Listing
    names: Mapping[str, Entry]
    places: Mapping[str, int]
    start: int
    stop: int
    path: str = ""

    def place(self, name: str) -> int | None:
        """Return a node's place in the block; None if it is outside."""
        at = self.places.get(name, -1)
        return at - self.start if self.start <= at < self.stop else None


class _Blocks:
    """Nodes of one graph, with the place where each numbered module begins."""

    def __init__(self, listing: Listing, entries: Sequence[Entry]) -> None:
        self._listing, self._entries = listing, entries
        self._names = {entry.name: entry for entry in listing.entries}
        self._places = {entry.name: at for at, entry in enumerate(entries)}
        self._begins: dict[str, int] = {}
        for at, entry in enumerate(entries):
            for path in _numbered(entry.module):
                self._begins.setdefault(path, at)

    def parts(self, start: int, stop: int, depth: int) -> Iterator[Entry | Alike]:
        """Yield the nodes from ``start`` to ``stop``; folds modules with more than ``depth`` parts in their paths."""
        at = start
        while at < stop:
            run = self._alike(at, stop, depth)
            if run is None:
                yield self._entries[at]
                at += 1
                continue
            alike, length = run
            yield alike
            at += length * alike.count

    def _alike(self, start: int, stop: int, depth: int) -> tuple[Alike, int] | None:
        """Return the blocks that are alike from ``start`` on, and the length of each; None if none are."""
        for path in _numbered(self._entries[start].module):
            following = self._begins.get(_next(path), -1)
            length = following - start
            if path.count(".") < depth or self._begins[path] != start or length <= 0:
                continue
            blocks = [path]
            first = self._block(start, length, path)
            while start + length * (len(blocks) + 1) <= stop:
                other = self._block(start + length * len(blocks), length, _next(blocks[-1]))
                if not self._same_nodes(first, other):
                    break
                blocks.append(other.path)
            if len(blocks) > 1:
                parts = tuple(self.parts(start, following, path.count(".") + 1))
                return Alike(path, blocks[-1], len(blocks), parts), length
        return None

    def _block(self, start: int, length: int, path: str) -> _Block:
        return _Block(self._listing, self._names, self._places, start, start + length, path)

    def _same_nodes(self, one: _Block, other: _Block) -> bool:
        nodes = zip(self._entries[one.start : one.stop], self._entries[other.start : other.stop], strict=True)
        return all(_same(*pair, one, other) for pair in nodes)


def _numbered(module: str) -> Iterator[str]:
    """Yield the modules around ``module``, and itself, whose names are numbers: ``"h.0"`` of ``"h.0.attn"``."""
    parts = module.split(".")
    return (".".join(parts[: at + 1]) for at, part in enumerate(parts) if part.isdecimal())


def _next(path: str) -> str:
    before, _, number = path.rpartition(".")
    return f"{before}{'.' if before else ''}{int(number) + 1}"


def _same(entry: Entry, twin: Entry, one: _Block, other: _Block) -> bool:
    """Whether two nodes show the same, each in its block."""
    return (
        _plain(entry) == _plain(twin)
        and (not entry.is_call or entry.target == twin.target)
        and _same_module(entry.module, twin.module, one.path, other.path)
        and len(entry.inputs) == len(twin.inputs)
        and all(_same_name(*pair, one, other) for pair in zip(entry.inputs, twin.inputs, strict=True))
        and all(_same_text(*pair, one, other) for pair in zip(_texts(entry), _texts(twin), strict=True))
        and len(entry.bodies) == len(twin.bodies)
        and all(_same_body(*pair, one, other) for pair in zip(entry.bodies, twin.bodies, strict=True))
    )


def _same_module(module: str, twin: str, path: str, other: str) -> bool:
    if path and (module == path or module.startswith(f"{path}.")):
        return twin == other + module[len(path) :]
    return module == twin


def _same_name(name: str, twin: str, one: _Block, other: _Block) -> bool:
    """Whether two names mean nodes at the same place of their blocks, or nodes outside of the same type."""
    places = one.place(name), other.place(twin)
    if places != (None, None):
        return places[0] == places[1]
    if name not in one.names or twin not in other.names:
        return name == twin
    entry, outside = one.names[name], other.names[twin]
    return (entry.values, entry.was, entry.symbol) == (outside.values, outside.was, outside.symbol)


def _same_text(text: str, twin: str, one: _Block, other: _Block) -> bool:
    """Whether two texts are equal, except for names of nodes and bodies that mean the same."""
    if text == twin:
        return True
    words, others = _WORDS.findall(text), _WORDS.findall(twin)
    return len(words) == len(others) and all(
        word == also or (word in one.names and also in other.names and _same_name(word, also, one, other))
        for word, also in zip(words, others, strict=True)
    )


def _same_body(name: str, twin: str, one: _Block, other: _Block) -> bool:
    """Whether the bodies of two higher-order ops show the same, node by node."""
    if name not in one.listing.bodies or twin not in other.listing.bodies:
        return name not in one.listing.bodies and twin not in other.listing.bodies
    mine, its = (_whole(block.listing.bodies[body], block.path) for body, block in ((name, one), (twin, other)))
    nodes, twins = mine.listing.entries, its.listing.entries
    return len(nodes) == len(twins) and all(_same(*pair, mine, its) for pair in zip(nodes, twins, strict=True))


def _whole(body: Listing, path: str) -> _Block:
    names = {entry.name: entry for entry in body.entries}
    return _Block(body, names, {name: at for at, name in enumerate(names)}, 0, len(names), path)
