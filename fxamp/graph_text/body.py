"""Build a listing from the syntax tree of a graph's class: one entry per statement."""

import ast
from dataclasses import dataclass, field, replace
from typing import Any

from fxamp.errors import ListingError
from fxamp.graph_text.annotations import symbol, tensor_type
from fxamp.graph_text.calls import classify, dotted, names_in, operator_name
from fxamp.graph_text.fields import entry_fields
from fxamp.graph_text.log_lines import Block
from fxamp.graph_text.margin import Margin, read_margin
from fxamp.graph_text.model import Entry, Listing


def read_class(tree: ast.ClassDef, block: Block, ours: bool, where: str, warnings: list[str]) -> Listing:
    """Return the listing of a class and of the classes nested in it.

    ``block`` is the text that ``tree`` was parsed from. ``ours`` means that fxamp wrote it, so each node has its own
    comments. ``where`` is the prefix of messages. Raises ListingError.
    """
    margin = read_margin(block.text.split("\n"), ours)
    warnings += [f"{where}{block.line + number - 1}: {why}" for number, why in margin.broken]
    reader = _Reader(block, margin, where, warnings)
    return reader.read(tree, block.name)


@dataclass
class _Graph:
    """One graph while it is read.

    ``names`` maps a name in the text to the name of its node, ``places`` the name of a parameter to the index of its
    entry. ``types`` are types from separate statements.
    """

    bodies: frozenset[str]
    entries: list[Entry] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, str] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    types: dict[str, dict[str, Any]] = field(default_factory=dict)


class _Reader:
    def __init__(self, block: Block, margin: Margin, where: str, warnings: list[str]) -> None:
        self._lines = block.text.split("\n")
        self._first = block.line
        self._margin = margin
        self._where = where
        self._warnings = warnings

    def read(self, tree: ast.ClassDef, name: str) -> Listing:
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        if "forward" not in functions:
            raise self._error(tree.lineno, f"class {name} has no forward")
        inner = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        graph = _Graph(frozenset(node.name for node in inner))
        self._inputs(functions["forward"], graph)
        for statement in functions["forward"].body:
            self._statement(statement, graph)
        if not any(entry.kind == "output" for entry in graph.entries):
            line = self._first + tree.lineno - 1
            self._warnings.append(f"{self._where}{line}: {name} has no return; is it truncated?")
        entries = (entry if entry.name else replace(entry, name=entry.target) for entry in graph.entries)
        return Listing(name, tuple(entries), {node.name: self.read(node, node.name) for node in inner})

    def _inputs(self, function: ast.FunctionDef, graph: _Graph) -> None:
        for target, argument in _parameters(function.args):
            fields = self._fields(self._margin.inputs.get((function.lineno, argument.arg), []), function.lineno)
            self._input(Entry(argument.arg, "placeholder", target, **_types(argument.annotation) | fields), graph)

    def _input(self, entry: Entry, graph: _Graph) -> None:
        graph.places[entry.name] = len(graph.entries)
        graph.entries.append(entry)
        graph.names[entry.name] = entry.name

    def _statement(self, statement: ast.stmt, graph: _Graph) -> None:
        if isinstance(statement, ast.AnnAssign):
            if statement.value is None:
                return self._type_input(ast.unparse(statement.target), _types(statement.annotation), graph)
            return self._assign(statement, statement.target, statement.value, statement.annotation, graph)
        if isinstance(statement, ast.Assign):
            return self._assign(statement, statement.targets[0], statement.value, None, graph)
        if isinstance(statement, ast.AugAssign):
            return self._write(statement, operator_name(statement), [statement.target, statement.value], graph)
        if isinstance(statement, ast.Return):
            return self._output(statement, graph)
        if isinstance(statement, ast.Expr):
            if not isinstance(statement.value, ast.Constant):
                self._node(statement, f"line_{statement.lineno}", statement.value, None, graph)
            return None
        if isinstance(statement, (ast.Pass, ast.Delete)):
            return None
        raise self._error(statement.lineno, f"a graph holds no {type(statement).__name__.lower()} statement")

    def _assign(
        self, statement: ast.stmt, target: ast.expr, value: ast.expr, annotation: ast.expr | None, graph: _Graph
    ) -> None:
        if isinstance(target, ast.Subscript):
            return self._write(statement, "operator.setitem", [target.value, target.slice, value], graph)
        if isinstance(value, ast.Constant) and value.value is None:
            return None  # ``x = None``: the value is no longer used
        if not isinstance(target, ast.Name):
            return self._unpack(statement, names_in(target), value, graph)
        if isinstance(value, ast.Name):
            return self._alias(target.id, value.id, annotation, graph)
        return self._node(statement, target.id, value, annotation, graph)

    def _type_input(self, name: str, types: dict[str, Any], graph: _Graph) -> None:
        """Record types of unpacked inputs, which come first, in separate statements."""
        graph.types[name] = types
        if name in graph.places:
            at = graph.places[name]
            graph.entries[at] = replace(graph.entries[at], **types)

    def _unpack(self, statement: ast.stmt, names: list[str], value: ast.expr, graph: _Graph) -> None:
        """``a, b, = fx_pytree.tree_flatten_spec([x], self._in_spec)``: the inputs of a graph whose caller passes trees.

        The function's parameters are not nodes.
        """
        if not isinstance(value, ast.Call) or not (dotted(value.func) or "").endswith("tree_flatten_spec"):
            raise self._error(statement.lineno, "a graph gives a value one name, not several")
        by_name = {entry.name: entry for entry in graph.entries}
        graph.entries, graph.names, graph.places = [], {}, {}
        for name in names:
            entry = by_name.get(name, Entry(name, "placeholder", name))
            self._input(replace(entry, **graph.types.get(name, {})), graph)

    def _alias(self, name: str, other: str, annotation: ast.expr | None, graph: _Graph) -> None:
        """``l_x_ = L_x_`` gives an input its node's name; ``setitem = x`` names the preceding item assignment."""
        node = graph.names.get(other, other)
        last = graph.entries[-1] if graph.entries else None
        if last is not None and last.name == "" and node in last.inputs:
            graph.entries[-1] = replace(last, name=name, **_types(annotation))
            graph.names[name] = name
            return
        if other == node in graph.places and name not in graph.names:
            at = graph.places.pop(other)
            graph.entries[at] = replace(graph.entries[at], name=name)
            graph.names[other] = node = name
        graph.names[name] = node

    def _write(self, statement: ast.stmt, target: str, parts: list[ast.expr], graph: _Graph) -> None:
        """An item assignment or augmented assignment: a call that gets its name from the next statement."""
        call = f"{target}({', '.join(self._text(part) for part in parts)})"
        inputs = _distinct([graph.names[n] for part in parts for n in names_in(part) if n in graph.names])
        source, fields = self._about(statement)
        graph.entries.append(Entry("", "call_function", target, call, inputs, source=source, **fields))

    def _node(
        self, statement: ast.stmt, name: str, value: ast.expr, annotation: ast.expr | None, graph: _Graph
    ) -> None:
        kind, target = classify(value, graph.names)
        inputs = _distinct([graph.names[n] for n in names_in(value) if n in graph.names])
        source, fields = self._about(statement)
        bodies = tuple(graph.attributes[n] for n in inputs if n in graph.attributes and kind == "call_function")
        if kind == "get_attr" and target in graph.bodies:
            graph.attributes[name] = target
        if kind == "call_module" and target in graph.bodies:
            bodies = (target,)
        known = {"bodies": bodies, **_types(annotation), **fields}
        graph.entries.append(Entry(name, kind, target, self._text(value), inputs, source=source, **known))
        graph.names[name] = name

    def _output(self, statement: ast.Return, graph: _Graph) -> None:
        call = self._text(statement.value) if statement.value is not None else "None"
        inputs = _distinct([graph.names[name] for name in names_in(statement.value) if name in graph.names])
        source, fields = self._about(statement)
        known = {"name": "output", **fields}
        graph.entries.append(Entry(kind="output", target="output", call=call, inputs=inputs, source=source, **known))

    def _about(self, statement: ast.stmt) -> tuple[Any, dict[str, Any]]:
        note = self._margin.lines.get(statement.lineno)
        return (None, {}) if note is None else (note.source, self._fields(note.fields, statement.lineno))

    def _fields(self, fields: list[tuple[str, str]], line: int) -> dict[str, Any]:
        values, unknown = entry_fields(fields)
        at = self._first + line - 1
        self._warnings += [f"{self._where}{at}: unknown key {key!r} in fxamp's comment" for key in unknown]
        return values

    def _text(self, value: ast.expr) -> str:
        line = self._lines[value.lineno - 1]
        if value.end_lineno != value.lineno:
            return ast.unparse(value)
        if line.isascii():
            return line[value.col_offset : value.end_col_offset]
        return line.encode()[value.col_offset : value.end_col_offset].decode()  # ast counts bytes

    def _error(self, line: int, what: str) -> ListingError:
        return ListingError(f"{self._where}{self._first + line - 1}: {what}")


def _parameters(signature: ast.arguments) -> list[tuple[str, ast.arg]]:
    """Return the parameters after ``self``, each with its node's target: ``"*args"``, as torch names it."""
    parameters = [("", argument) for argument in (*signature.posonlyargs, *signature.args)]
    parameters += [("*", signature.vararg)] if signature.vararg else []
    parameters += [("", argument) for argument in signature.kwonlyargs]
    parameters += [("**", signature.kwarg)] if signature.kwarg else []
    return [(stars + argument.arg, argument) for stars, argument in parameters if argument.arg != "self"]


def _types(annotation: ast.expr | None) -> dict[str, Any]:
    if annotation is None:
        return {}
    text = annotation.value if isinstance(annotation, ast.Constant) else ast.unparse(annotation)
    if not isinstance(text, str):
        return {}
    kind = tensor_type(text)
    return {"values": (kind,)} if kind is not None else {"symbol": symbol(text)}


def _distinct(names: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
