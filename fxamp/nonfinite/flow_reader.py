"""Read the data flow of a graph that is compiled with measurements (:mod:`fxamp.passes.shared.magnitudes`)."""

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fxamp.graph import AliasSets, fake_tensors, graph_output, nesting_change, returned, source_frames, writes
from fxamp.graph.higher_order_ops import AutogradFunction, autograd_function, bodies
from fxamp.graph_text import Entry, Listing
from fxamp.graph_text.model import Source
from fxamp.nonfinite.flow import Flow, Kind, Value
from fxamp.passes.backward.scale_backward import tangents
from fxamp.passes.shared.kept_packing import PACKED
from fxamp.passes.shared.magnitudes import (
    MEASURED,
    OP,
    holds_infinity,
    is_made_of_numbers,
    largest_after,
    largest_finite,
    name_after,
    passes_on,
)
from fxamp.torch_private import owner_of_gradient, source_text


def flow_of(gm: GraphModule, listing: Listing, kinds: Sequence[Kind] = ()) -> Flow:
    """Return the flow of ``gm``, which holds measurements; ``listing`` is that of ``gm`` before they were inserted.

    ``kinds``: the kinds of its inputs; without them, ``gm`` is AOTAutograd's backward, whose inputs show their kinds.
    """
    names = {name: at for at, name in enumerate(graph_output(gm.graph).meta[MEASURED])}
    values = _Values(names)
    returned = _GraphReader(values, gm, listing).read(kinds or _kinds(gm))
    floating = tuple(None if at is None or not values.all[at].limit else at for at in returned)
    results = tuple(dict.fromkeys(at for at in floating if at is not None))
    inputs = tuple(_input_name(node) for node in gm.graph.find_nodes(op="placeholder"))
    known = zip(returned, _owners(gm), strict=True)
    owners = tuple((at, owner) for at, owner in known if at is not None and owner is not None)
    return Flow(tuple(values.all), results, listing, inputs, owners, values.functions, floating, tuple(values.written))


def _input_name(node: Node) -> str:
    """Return the path of a parameter or buffer in its model; the node's name for another input."""
    path = [next(filter(None, part)) for part in re.findall(r"\['(\w+)'\]|\.(?!_)(\w+)", source_text(node))]
    return ".".join(path[1:] if path[:1] == ["self"] else path) or node.name


def _owners(gm: GraphModule) -> list[int | None]:
    """Return for each result of ``gm`` the number of the input whose gradient it is."""
    output = graph_output(gm.graph)
    leaves = pytree.tree_leaves(output.args[0])
    described = output.meta.get("desc", ())
    return [owner_of_gradient(text) for text in described] if len(described) == len(leaves) else [None] * len(leaves)


def _kinds(gm: GraphModule) -> list[Kind]:
    """Return the kinds of a backward's inputs."""
    entering = set(tangents(gm))
    kinds = []
    for node in gm.graph.find_nodes(op="placeholder"):
        given = getattr(node.meta.get("desc"), "is_param", lambda: False)() or "AOTInput" in str(node.meta.get("desc"))
        saved = Kind.KEPT if node.meta.get(PACKED) else Kind.SAVED
        kinds.append(Kind.GRADIENT if node in entering else Kind.INPUT if given else saved)
    return kinds


def _flow_of_function(function: AutogradFunction, listing: Listing) -> Flow:
    """Return the flow of a Function's backward, which is measured separately."""
    results, saved = returned(function.forward.module.graph)
    kinds = [Kind.GRADIENT] * len(pytree.tree_leaves(results)) + [Kind.SAVED] * len(saved)
    return flow_of(function.backward.module, listing, kinds)


class _Transforms:
    """Follows the torch.func transforms of a graph. An outermost one counts as one op, because only its results count.

    The inputs of a value inside of one are all values that the transform has read so far, and its line is the one that
    calls the transform. It passes infinities on. Those that it makes count as intended if a number in it is infinite.
    """

    def __init__(self) -> None:
        self._depth, self._first, self._infinite = 0, 0, False
        self._read: list[Any] = []

    def reads(self, node: Node, at: Mapping[Node, Any], position: int) -> list[Any]:
        """Return the positions of what the next ``node`` reads; its own is ``position``."""
        reads = [at.get(leaf) for leaf in node.all_input_nodes]
        before, self._depth = self._depth, self._depth + nesting_change(node.target)
        if self._depth and not before:
            self._first, self._infinite, self._read = position, False, []
        if not self._depth:
            return reads
        self._infinite |= holds_infinity(node)
        self._read += reads
        return self._read

    def whole(self, node: Node, value: Value) -> Value:
        """Return the ``value`` of ``node`` as a result of the transform around it, if there is one."""
        if not self._depth:
            return value
        inputs = tuple(at for at in value.inputs if at < self._first)
        calls = [frame for frame in source_frames(node) if not frame.file.startswith(_TORCH)]
        where = [Source(frame.file, frame.line, frame.function, frame.text) for frame in calls[-1:]]
        entry = replace(value.entry, source=where[0] if where else value.entry.source)
        return replace(value, entry=entry, inputs=inputs, intended=self._infinite, passes=True)


_TORCH = str(Path(torch.__file__).parent)


class _Values:
    """The values of a graph and of the bodies in it. ``numbers``: the positions of measurements by the nodes' names."""

    def __init__(self, numbers: Mapping[str, int]) -> None:
        self.all: list[Value] = []
        self.functions: dict[str, Flow] = {}
        self.written: list[tuple[int, int]] = []
        self._numbers = numbers

    def add(self, node: Node, entry: Entry, reads: Sequence[Any], kind: Kind = Kind.OP, prefix: str = "") -> int:
        """Add the value of ``node`` in the body called ``prefix``; return its position. ``reads``: those of inputs."""
        inputs = tuple(dict.fromkeys(read for read in reads if isinstance(read, int)))
        floating = [value.dtype for value in fake_tensors(node.meta.get("val")) if value.is_floating_point()]
        self.all.append(
            Value(
                replace(entry, name=prefix + entry.name),
                inputs,
                kind,
                self._numbers.get(prefix + node.name),
                largest_finite(floating[0]) if floating else 0.0,
                holds_infinity(node),
                kind is Kind.OP and not passes_on(node) and is_made_of_numbers(node),
                passes_on(node),
                largest_after(node),
                node.meta.get("custom", {}).get(OP, ""),
            )
        )
        return len(self.all) - 1

    def add_after_run(self, node: Node, before: Any, writers: Sequence[int]) -> None:
        """Add what an input holds after the run, if that is measured: the ops at ``writers`` have written to it."""
        number = self._numbers.get(name_after(node))
        if number is None:
            return
        value, last = self.all[before], self.all[(before, *writers)[-1]]
        entry = replace(last.entry, name=name_after(node), values=value.entry.values)
        inputs = tuple(dict.fromkeys((*last.inputs, *writers)))
        self.written.append((len(self.all), before))
        self.all.append(Value(entry, inputs, Kind.OP, number, value.limit, passes=True))


class _GraphReader:
    """Reads one graph into ``values``: the whole graph, or the body called ``prefix``."""

    def __init__(self, values: _Values, gm: GraphModule, listing: Listing, prefix: str = "") -> None:
        self._values, self._gm, self._prefix, self._bodies = values, gm, prefix, listing.bodies
        self._entries = {entry.name: entry for entry in listing.entries}
        self._aliases, self._transforms = AliasSets(gm.graph), _Transforms()
        self._writes: list[tuple[Node, int]] = []
        #: The position of each node's value. For a call with measured bodies: of each result, the positions in them.
        self._at: dict[Node, Any] = {}

    def read(self, kinds: Sequence[Kind] = (), operands: Sequence[int | None] | None = None) -> list[int | None]:
        """Read the graph; return the positions of its results.

        ``kinds``: those of the graph's inputs. ``operands``: the positions of a body's inputs, which are no new values.
        """
        nodes = self._gm.graph.nodes
        inputs = self._gm.graph.find_nodes(op="placeholder")
        if operands is not None:
            self._at |= zip(inputs, operands, strict=True)
        kind_of = dict(zip(inputs, kinds, strict=False))
        for node in nodes:
            if node.name in self._entries and node.op != "output" and node not in self._at:
                self._read(node, kind_of.get(node) or _KINDS.get(node.op, Kind.OP))
        for node in inputs:
            writers = [by for memory, by in self._writes if self._aliases.shared(memory, node)]
            self._values.add_after_run(node, self._at.get(node), writers)
        leaves = pytree.tree_leaves(returned(self._gm.graph))
        return [self._at.get(leaf) if isinstance(leaf, Node) else None for leaf in leaves]

    def _read(self, node: Node, kind: Kind) -> None:
        inside = self._in_bodies(node)
        if inside is not None:
            self._at[node] = inside
            if writes(node):
                self._note_writes(node, self._add(node, self._entries[node.name], pytree.tree_leaves(inside), kind))
            return
        picked = self._picked_from_bodies(node)
        if len(picked) == 1:
            self._at[node] = picked[0]
            return
        reads = [*self._transforms.reads(node, self._at, len(self._values.all)), *picked]
        reads += [
            by for memory, by in self._writes for leaf in node.all_input_nodes if self._aliases.shared(memory, leaf)
        ]
        self._at[node] = self._add(node, self._entry(node), reads, kind)
        self._values.all[-1] = self._transforms.whole(node, self._values.all[-1])
        self._note_writes(node, self._at[node])

    def _add(self, node: Node, entry: Entry, reads: Sequence[Any], kind: Kind) -> int:
        return self._values.add(node, entry, reads, kind, self._prefix)

    def _note_writes(self, node: Node, position: int) -> None:
        self._writes += [(memory, position) for memory in writes(node)]

    def _entry(self, node: Node) -> Entry:
        """Return the entry of ``node``; a result that is picked from several has the entry of their call."""
        own = self._entries[node.name]
        source: Any = node.args[0] if node.target is operator.getitem else None
        picked = isinstance(source, Node) and source.name in self._entries
        return replace(self._entries[source.name], values=own.values) if picked else own

    def _picked_from_bodies(self, node: Node) -> list[int | None]:
        """Return the positions, in measured bodies, of the result that ``node`` picks; none for another node."""
        args: Any = node.args if node.target is operator.getitem else (None, None)
        results = self._at.get(args[0])
        return results[args[1]] if isinstance(results, list) else []

    def _in_bodies(self, node: Node) -> list[list[int | None]] | None:
        """Read the bodies that are measured; return the positions of each result in them. Else None."""
        results = []
        function = autograd_function(node)
        if function is not None and MEASURED in graph_output(function.backward.module.graph).meta:
            listing = self._bodies[str(function.backward.attribute.target)]
            self._values.functions[self._prefix + node.name] = _flow_of_function(function, listing)
        for body in bodies(node) if function is None else [function.forward]:
            if MEASURED in graph_output(body.module.graph).meta:
                name = str(body.attribute.target)
                operands = [self._at.get(operand) if isinstance(operand, Node) else None for operand in body.operands]
                reader = _GraphReader(self._values, body.module, self._bodies[name], f"{self._prefix}{name}/")
                results.append(reader.read(operands=operands))
        return [list(each) for each in zip(*results, strict=True)] if results else None


_KINDS = {"get_attr": Kind.CONSTANT}
