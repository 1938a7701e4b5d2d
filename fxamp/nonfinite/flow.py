"""The data flow of a graph as plain data: enough to find the op that produced the first non-finite value.

A flow is built once, when a graph is compiled, after measurements were inserted
(:mod:`fxamp.passes.shared.magnitudes`). It includes the ops inside checkpoints, conds and the forwards of Functions. An
unmeasured value counts as finite if its inputs are.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fxamp.graph import AliasSets, fake_tensors, graph_output, nesting_change, source_frames, writes
from fxamp.graph.higher_order_ops import AutogradFunction, autograd_function, bodies
from fxamp.graph_text import Entry, Listing
from fxamp.graph_text.model import Source
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


class Kind(StrEnum):
    """Where a value comes from."""

    OP = "op"
    INPUT = "input"
    PARAMETER = "parameter"
    CONSTANT = "constant"
    SAVED = "value saved by the forward"
    GRADIENT = "gradient that enters the graph"
    KEPT = "value kept for the backward in fewer bits"


@dataclass(frozen=True)
class Value:
    """A value of a graph.

    ``entry`` records its op, or the input itself. ``inputs``: the positions of the values that it is computed from.
    ``number``: the position of its measurement; None if it has none. ``limit``: the largest finite number of its dtype,
    0 if it is not floating; a tuple of results has the limit of its first floating one. ``intended``: an infinite
    number is among the arguments of its op. ``fresh``: it is made of finite numbers alone.
    ``passes``: it holds the elements of its inputs, possibly converted. ``largest``: its largest magnitude as a
    function of its input's. ``forward``: in a backward, the name of the forward's node that it belongs to.
    """

    entry: Entry
    inputs: tuple[int, ...] = ()
    kind: Kind = Kind.OP
    number: int | None = None
    limit: float = 0.0
    intended: bool = False
    fresh: bool = False
    passes: bool = False
    largest: Callable[[float], float] | None = None
    forward: str = ""

    @property
    def op(self) -> str:
        """The op's name without namespace and overload: ``"softmax"``."""
        return self.entry.target.partition("::")[2].partition(".")[0].strip("_") or self.entry.target


@dataclass(frozen=True, eq=False)
class Flow:
    """The values of a graph in program order, the positions of its floating results, and the graph's listing.

    ``inputs`` are the names of a forward's inputs; parameters have their names in the model. ``owners``: the positions
    of results of a backward, each with the number of the input whose gradient it is. ``functions``: the flows of the
    backwards of Functions that are measured separately, by the names of the Functions' nodes. ``returned``: the
    position of each result of the graph, None if it is not floating. ``written``: for each input that the graph writes
    to, the positions of what it holds after the run, and of what it held before.
    """

    values: tuple[Value, ...]
    results: tuple[int, ...]
    listing: Listing
    inputs: tuple[str, ...] = ()
    owners: tuple[tuple[int, int], ...] = ()
    functions: Mapping[str, "Flow"] = field(default_factory=dict)
    returned: tuple[int | None, ...] = ()
    written: tuple[tuple[int, int], ...] = ()

    @property
    def numbers(self) -> int:
        """The number of measured values."""
        return sum(value.number is not None for value in self.values)

    @cached_property
    def _limits(self) -> tuple[float, Sequence[tuple[int, float]] | None]:
        """The smallest limit of all values; the measurement and limit of each result, None if one is not measured.

        What inputs hold after the run counts as a result.
        """
        results = [self.values[at] for at in (*self.results, *(after for after, _ in self.written))]
        known = [(value.number, value.limit) for value in results if value.number is not None]
        least = min((value.limit for value in self.values if value.limit), default=0.0)
        return least, known if len(known) == len(results) else None

    def is_finite(self, numbers: Sequence[float]) -> bool:
        """Whether a quick look at ``numbers`` shows that all results, or all values, of the run are finite."""
        least, results = self._limits
        if results is not None and all(numbers[number] <= limit for number, limit in results):
            return True
        return all(number <= least for number in numbers)

    def of_gradients(self, with_gradient: Sequence[bool]) -> "Flow":
        """Return the flow without the results that have no gradient, unless none of them has one."""
        kept = [at for at, has in zip(self.returned, with_gradient, strict=False) if has and at is not None]
        return replace(self, results=tuple(dict.fromkeys(kept))) if kept else self

    def position(self, name: str) -> int | None:
        """Return the position of the value of the node called ``name``."""
        return next((at for at, value in enumerate(self.values) if value.entry.name == name), None)

    def in_body(self, name: str) -> Entry | None:
        """Return the node called ``"body/name"`` of a body, whether it is among the values or not."""
        *path, own = name.split("/")
        listing = self.listing
        for body in path:
            listing = listing.bodies[body]
        return listing.entry(own) if path else None


def flow_of(gm: GraphModule, listing: Listing, kinds: Sequence[Kind] = ()) -> Flow:
    """Return the flow of ``gm``, which holds measurements; ``listing`` is that of ``gm`` before they were inserted.

    ``kinds``: the kinds of its inputs; without them, ``gm`` is AOTAutograd's backward, whose inputs show their kinds.
    """
    names = {name: at for at, name in enumerate(graph_output(gm.graph).meta[MEASURED])}
    reader = _Reader(names)
    returned = reader.read(gm, listing, "", kinds or _kinds(gm), ())
    floating = tuple(None if at is None or not reader.values[at].limit else at for at in returned)
    results = tuple(dict.fromkeys(at for at in floating if at is not None))
    inputs = tuple(_input_name(node) for node in gm.graph.find_nodes(op="placeholder"))
    known = zip(returned, _owners(gm), strict=True)
    owners = tuple((at, owner) for at, owner in known if at is not None and owner is not None)
    return Flow(
        tuple(reader.values), results, listing, inputs, owners, reader.functions, floating, tuple(reader.written)
    )


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
    results: Any = graph_output(function.forward.module.graph).args[0]
    kinds = [Kind.GRADIENT] * len(pytree.tree_leaves(results[0])) + [Kind.SAVED] * len(results[1])
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


class _Reader:
    """Reads graphs and the bodies in them into one list of values."""

    def __init__(self, numbers: Mapping[str, int]) -> None:
        self.values: list[Value] = []
        self.functions: dict[str, Flow] = {}
        self.written: list[tuple[int, int]] = []
        self._numbers = numbers

    def read(
        self, gm: GraphModule, listing: Listing, prefix: str, kinds: Sequence[Kind], bound: Sequence[Any]
    ) -> list[int | None]:
        """Read ``gm``; return the positions of its results. ``bound``: those of its inputs, if it is a body."""
        entries = {entry.name: entry for entry in listing.entries}
        at: dict[Node, Any] = {}
        sets = AliasSets(gm.graph)
        written: list[tuple[Node, int]] = []
        inputs, transforms = iter(bound or kinds), _Transforms()
        for node in gm.graph.nodes:
            if node.op == "placeholder" and bound:
                at[node] = next(inputs)
                continue
            kind = next(inputs) if node.op == "placeholder" else _KINDS.get(node.op, Kind.OP)
            if node.name not in entries or node.op == "output":
                continue
            inner = self._bodies(node, listing, prefix, at)
            if inner is not None:
                at[node] = inner
                if memories := writes(node):
                    by = self._add(node, entries[node.name], prefix, pytree.tree_leaves(inner), kind)
                    written += [(memory, by) for memory in memories]
                continue
            source: Any = node.args[0] if node.target is operator.getitem else None
            both: Any = at.get(source)
            inside = both[node.args[1]] if isinstance(both, list) else []
            if len(inside) == 1:
                at[node] = inside[0]
                continue
            reads = [*transforms.reads(node, at, len(self.values)), *inside]
            reads += [by for memory, by in written for leaf in node.all_input_nodes if sets.shared(memory, leaf)]
            entry = entries[node.name]
            if isinstance(source, Node) and source.name in entries:
                entry = replace(entries[source.name], values=entry.values)
            at[node] = self._add(node, entry, prefix, reads, kind)
            self.values[-1] = transforms.whole(node, self.values[-1])
            written += [(memory, at[node]) for memory in writes(node)]
        for node in gm.graph.find_nodes(op="placeholder"):
            self._add_after(node, at.get(node), [by for memory, by in written if sets.shared(memory, node)])
        leaves = pytree.tree_leaves(graph_output(gm.graph).args[0])
        return [at.get(leaf) if isinstance(leaf, Node) else None for leaf in leaves]

    def _add_after(self, node: Node, before: Any, by: Sequence[int]) -> None:
        """Add what an input holds after the run, if that is measured: the values at ``by`` were written to it."""
        number = self._numbers.get(name_after(node))
        if number is None:
            return
        value, last = self.values[before], self.values[(before, *by)[-1]]
        entry = replace(last.entry, name=name_after(node), values=value.entry.values)
        inputs = tuple(dict.fromkeys((*last.inputs, *by)))
        self.written.append((len(self.values), before))
        self.values.append(Value(entry, inputs, Kind.OP, number, value.limit, passes=True))

    def _bodies(
        self, node: Node, listing: Listing, prefix: str, at: Mapping[Node, Any]
    ) -> list[list[int | None]] | None:
        """Read the bodies that are measured; return the positions of each result in them. Else None."""
        results = []
        function = autograd_function(node)
        if function is not None and MEASURED in graph_output(function.backward.module.graph).meta:
            inner = listing.bodies[str(function.backward.attribute.target)]
            self.functions[prefix + node.name] = _flow_of_function(function, inner)
        for body in bodies(node) if function is None else [function.forward]:
            if MEASURED in graph_output(body.module.graph).meta:
                name = str(body.attribute.target)
                operands = [at.get(operand) if isinstance(operand, Node) else None for operand in body.operands]
                results.append(self.read(body.module, listing.bodies[name], f"{prefix}{name}/", (), operands or [None]))
        return [list(each) for each in zip(*results, strict=True)] if results else None

    def _add(self, node: Node, entry: Entry, prefix: str, reads: Sequence[Any], kind: Kind) -> int:
        inputs = tuple(dict.fromkeys(read for read in reads if isinstance(read, int)))
        floating = [value.dtype for value in fake_tensors(node.meta.get("val")) if value.is_floating_point()]
        self.values.append(
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
        return len(self.values) - 1


_KINDS = {"get_attr": Kind.CONSTANT}
