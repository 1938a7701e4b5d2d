"""Rebuild an fx graph from a listing that was read from text, on FakeTensors, without running any of the text."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from fxamp.errors import ListingError
from fxamp.graph import dtype_name, fake_tensors
from fxamp.graph_text import Entry, Listing, TensorType
from fxamp.tools.common.formatting import plural
from fxamp.tools.inputs.expressions import Opaque, Reader, Unreadable
from fxamp.tools.inputs.limits import limited
from fxamp.tools.inputs.prepare import ProgramGraph
from fxamp.tools.inputs.propagate import ANNOTATED, propagate
from fxamp.tools.inputs.symbols import Symbols
from fxamp.torch_private.parts.fx import dtype_abbrs

_DTYPES: Mapping[str, torch.dtype] = {short: dtype for dtype, short in dtype_abbrs.items()}

#: ``split[0]`` and ``operator.getitem(split, 0)``.
_PICK = re.compile(r"\w+\[(\d+)\]|(?:_?operator\.)?getitem\(\w+, (\d+)\)")

#: A number that depends on data.
_UNBACKED = re.compile(r"\bz?u(f?)\d+\b")

#: Substrings by which parameters are recognised in the names of Dynamo's and torch.export's graphs.
_PARAMETER_MARKS = ("_parameters_", "_parameters.")


@dataclass(frozen=True)
class Built:
    """A graph, FakeTensors for its inputs, and warnings about calls that could not be rebuilt."""

    module: GraphModule
    inputs: list[Any]
    symbols: Symbols
    warnings: tuple[str, ...] = ()


@dataclass
class _Text:
    """The state shared by a graph and its bodies: file, symbols, fake mode, warnings."""

    file: str
    symbols: Symbols
    mode: FakeTensorMode
    exact_gradients: bool
    warnings: list[str] = field(default_factory=list)

    def tensor(self, type_: TensorType, needs_grad: bool, what: str) -> torch.Tensor:
        """Return an empty, contiguous FakeTensor on the CPU."""
        if type_.dtype not in _DTYPES:
            raise ListingError(f"{self.file}: {what} has the unknown dtype {type_.dtype!r}")
        try:
            shape = [self.symbols.value(size) if isinstance(size, str) else size for size in type_.shape]
        except ValueError as error:
            raise ListingError(f"{self.file}: {what}: size {error}") from error
        dtype = _DTYPES[type_.dtype]
        with self.mode:
            fresh = torch.empty(shape, dtype=dtype, device="cpu")
        return fresh.requires_grad_(needs_grad and (dtype.is_floating_point or dtype.is_complex))


def build(listing: Listing, file: str) -> Built:
    """Rebuild the graph of ``listing``, which was read from ``file``; every tensor is fake and on the CPU.

    Tensors are contiguous, because a listing has no strides. A call of an unknown or disallowed function becomes an
    opaque node with the result type that the text gives, and a warning. Raises ListingError for an input without a
    type, and for a value whose type is unknown.
    """
    symbols = Symbols(unbacked=any(_UNBACKED.search(text) for text in _symbolic(listing)))
    dynamic = next(_symbolic(listing), None) is not None
    mode = FakeTensorMode(shape_env=symbols.shape_env, allow_non_fake_inputs=True, static_shapes=not dynamic)
    exact = bool(listing.stage) or any(entry.needs_grad for entry in listing.entries)
    text = _Text(file, symbols, mode, exact)
    with limited(len(listing.entries), file):
        module = _graph(listing, text)
        propagate(module, _inputs(listing, text), mode, file)
    text.warnings += _disagreements(listing, module)
    return Built(module, _inputs(listing, text), symbols, tuple(dict.fromkeys(text.warnings)))


def _disagreements(listing: Listing, module: GraphModule) -> list[str]:
    """Return one warning if values get different dtypes than in the text, as in a program captured under autocast."""
    nodes = {node.name: node for node in module.graph.nodes}
    differences = []
    for entry in listing.entries:
        value = nodes[entry.name].meta.get("example_value") if entry.is_call and entry.name in nodes else None
        if isinstance(value, torch.Tensor) and len(entry.values) == 1 and dtype_name(value.dtype) != entry.dtype:
            differences.append(f"{entry.name}: {dtype_name(value.dtype)} here, {entry.dtype} in the text")
    if not differences:
        return []
    return [f"{plural(len(differences), 'value')} get different dtypes than in the text, such as {differences[0]}"]


def _symbolic(listing: Listing) -> Iterator[str]:
    for _, entry in listing.walk():
        yield from [entry.symbol] if entry.symbol else []
        yield from (size for value in entry.values for size in value.shape if isinstance(size, str))


def _inputs(listing: Listing, text: _Text) -> list[Any]:
    return [_input(entry, text) for entry in listing.entries if entry.kind == "placeholder"]


def _input(entry: Entry, text: _Text) -> Any:
    what = f"input {entry.name}"
    if entry.symbol:
        try:
            return text.symbols.value(entry.symbol)
        except ValueError as error:
            raise ListingError(f"{text.file}: {what}: {error}") from error
    if len(entry.values) != 1:
        raise ListingError(
            f"{text.file}: {what} has no type in the text, so that no policy can be applied; accepted: text with "
            'annotations such as "f32[8, 16]", as GraphModule.print_readable writes it'
        )
    needs_grad = entry.needs_grad or (not text.exact_gradients and _is_parameter(entry))
    return text.tensor(entry.values[0], needs_grad, what)


def _is_parameter(entry: Entry) -> bool:
    return any(mark in name for mark in _PARAMETER_MARKS for name in (entry.name, entry.target)) or (
        entry.name.startswith("p_")
    )


def _graph(listing: Listing, text: _Text) -> GraphModule:
    graph = Graph()
    owned: dict[str, Any] = {name: _graph(body, text) for name, body in listing.bodies.items()}
    types = {entry.target: entry for entry in listing.entries if entry.kind == "get_attr"}

    def attribute(path: str) -> Node:
        if path not in owned:
            owned[path] = _constant(types.get(path), path, text)
        return graph.create_node("get_attr", path, name=path.replace(".", "_"))

    reader = Reader(graph, attribute)
    picks = _picks(listing)
    for entry in listing.entries:
        node = _STEPS.get(entry.kind, _call)(entry, graph, reader, text)
        if node is not None:
            reader.names[entry.name] = node
            _note(node, entry, picks.get(entry.name, {}), text)
    text.warnings += [f"{path} is not known here: kept as the text has it" for path in reader.unknown]
    return GraphModule(_root(owned), graph)


def _root(owned: dict[str, Any]) -> torch.nn.Module:
    root = torch.nn.Module()
    for path, value in owned.items():
        *parents, name = path.split(".")
        owner = root
        for parent in parents:
            if not hasattr(owner, parent):
                owner.add_module(parent, torch.nn.Module())
            owner = getattr(owner, parent)
        setattr(owner, name, value)
    return root


def _constant(entry: Entry | None, path: str, text: _Text) -> torch.Tensor:
    if entry is None or len(entry.values) != 1:
        raise ListingError(f"{text.file}: self.{path} has no type in the text, so that no policy can be applied")
    return text.tensor(entry.values[0], _is_parameter(entry), f"self.{path}")


def _placeholder(entry: Entry, graph: Graph, reader: Reader, text: _Text) -> Node:
    node = graph.create_node("placeholder", entry.target or entry.name, name=entry.name)
    reader.names[entry.target] = node
    return node


def _output(entry: Entry, graph: Graph, reader: Reader, text: _Text) -> None:
    try:
        value = reader.value(entry.call)
    except Unreadable as error:
        raise ListingError(f"{text.file}: what the graph returns cannot be read: {error}") from error
    graph.output(value)


def _call(entry: Entry, graph: Graph, reader: Reader, text: _Text) -> Node:
    alias = reader.names.get(entry.call.strip())
    if alias is not None:
        return alias
    try:
        return reader.node(entry.call, entry.name)
    except Unreadable as error:
        text.warnings.append(f"{entry.name} = {entry.call[:60]}: {error}; kept as the text has it")
        inputs = tuple(reader.names[name] for name in entry.inputs if name in reader.names)
        return graph.create_node(
            "call_function", Opaque(entry.target or entry.name, str(error)), inputs, {}, entry.name
        )


_STEPS: Mapping[str, Callable[[Entry, Graph, Reader, _Text], Node | None]] = {
    "placeholder": _placeholder,
    "output": _output,
}


def _note(node: Node, entry: Entry, picks: Mapping[int, TensorType], text: _Text) -> None:
    """Copy the text's information to a node: the user's line, the module, and the types of its values."""
    if entry.source is not None:
        where = entry.source
        node.meta["stack_trace"] = f'  File "{where.file}", line {where.line}, in {where.function}\n    {where.code}\n'
    if entry.module or entry.module_class:
        path = "L['self']" + (f".{entry.module}" if entry.module else "")
        node.meta["nn_module_stack"] = {path: (path, entry.module_class)}
    if node.op.startswith("call"):
        node.meta[ANNOTATED] = _annotated(entry, picks, text)


def _annotated(entry: Entry, picks: Mapping[int, TensorType], text: _Text) -> Callable[[], Any] | None:
    """Return a function that creates a call's value from the text's types; None if the text gives none."""
    if len(entry.values) == 1:
        return lambda: text.tensor(entry.values[0], False, entry.name)
    if entry.values:
        return lambda: tuple(text.tensor(value, False, entry.name) for value in entry.values)
    if entry.symbol:
        return lambda: text.symbols.value(entry.symbol)
    if not picks:
        return None
    empty = torch.empty(0)
    return lambda: tuple(
        text.tensor(picks[index], False, entry.name) if index in picks else empty for index in range(max(picks) + 1)
    )


def _picks(listing: Listing) -> dict[str, dict[int, TensorType]]:
    """Return, for each node, the types that the text gives for its selected results, by position."""
    types: dict[str, dict[int, TensorType]] = defaultdict(dict)
    for entry in listing.entries:
        index = _PICK.fullmatch(entry.call)
        if index is not None and len(entry.values) == 1 and len(entry.inputs) == 1:
            types[entry.inputs[0]][int(index[1] or index[2])] = entry.values[0]
    return types


def prepare_listing(listing: Listing, file: str) -> ProgramGraph:
    """Return the graph of ``listing``, ready for policies. Raises ListingError as :func:`build` does."""
    built = build(listing, file)
    devices = {entry.name: entry.values[0].device for entry in listing.entries if _has_device(entry)}
    kinds = {device.partition(":")[0] for device in devices.values()}
    return ProgramGraph(
        listing.name,
        built.module,
        built.inputs,
        min(kinds - {"cpu", "meta"}, default="cpu" if "cpu" in kinds else ""),
        listing.ended,
        tuple(f"{file}: {warning}" for warning in built.warnings),
        devices if kinds - {"cpu"} else {},
        built.symbols.original,
        built.symbols.fixed,
    )


def _has_device(entry: Entry) -> bool:
    return entry.kind == "placeholder" and len(entry.values) == 1 and bool(entry.values[0].device)


def fill_values(listing: Listing, file: str) -> Listing:
    """Return ``listing`` with the types of all values: those in the text, others computed on FakeTensors."""
    built = build(listing, file)
    return _filled(listing, built.module, built.symbols)


def _filled(listing: Listing, module: GraphModule, symbols: Symbols) -> Listing:
    nodes = {node.name: node for node in module.graph.nodes}

    def types(entry: Entry) -> tuple[TensorType, ...]:
        node = nodes.get(entry.name)
        if entry.values or node is None or not entry.is_call:
            return entry.values
        return tuple(_type(value, symbols) for value in fake_tensors(node.meta.get("example_value")))

    entries = tuple(replace(entry, values=types(entry)) for entry in listing.entries)
    bodies = {name: _filled(body, getattr(module, name), symbols) for name, body in listing.bodies.items()}
    return replace(listing, entries=entries, bodies=bodies)


def _type(value: torch.Tensor, symbols: Symbols) -> TensorType:
    shape = tuple(size if isinstance(size, int) else symbols.original(str(size)) for size in value.shape)
    return TensorType(dtype_name(value.dtype), shape)
