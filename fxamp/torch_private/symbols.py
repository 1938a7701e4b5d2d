"""Sizes and numbers that depend on the values of tensors ("unbacked symbols")."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv, rebind_unbacked
from torch.utils import _pytree as pytree
from torch.utils._sympy.singleton_int import SingletonInt

_BINDINGS = "unbacked_bindings"


def rebind_sizes(node: Node, result: Any) -> None:
    """Give the new symbols in ``result``, another value of ``node``, the names that they have in its value so far.

    So a size has one name for everyone who traces the graph, and AOTAutograd finds in the results every symbol that was
    made. Does nothing where the two values belong to different traces. If torch renames the key of the bindings, graphs
    with such sizes raise in AOTAutograd.
    """
    before = node.meta.get("val", node.meta.get("example_value"))
    for path in (node.meta.get(_BINDINGS) or {}).values():
        old, new = (getattr(pytree.key_get(value, path), "node", None) for value in (before, result))
        if old is not None and new is not None and old.shape_env is new.shape_env and old.expr != new.expr:
            rebind_unbacked(new.shape_env, node, result)


def drop_guards_on_ragged_sizes(shapes: ShapeEnv | None) -> None:
    """Forget the guards on ragged sizes of nested tensors that the program makes: such a size equals no number.

    It is no size of an input, so Dynamo has no code to check it. Guards that read any other symbol stay. torch 2.15
    makes no such guards. If an older one names things differently, programs that make nested tensors raise when they
    are compiled.
    """
    guards = getattr(shapes, "guards", [])
    values = getattr(shapes, "backed_var_to_val", {})
    sources = getattr(shapes, "var_to_sources", {})

    def ragged(symbol: Any) -> bool:
        own = isinstance(values.get(symbol), SingletonInt)
        return own and all(source.is_ephemeral() for source in sources.get(symbol, ()))

    guards[:] = [one for one in guards if not one.expr.free_symbols or not all(map(ragged, one.expr.free_symbols))]


def size_tables(tracer: Any) -> tuple[dict[Any, Any], ...]:
    """Return the tables in which a tracer of make_fx notes the nodes of sizes, in the order of their entry.

    Breaks loudly.
    """
    return tracer.symnode_tracker.sym_node_dict, tracer.sympy_expr_tracker


@contextmanager
def dropped_sizes(shapes: ShapeEnv | None) -> Iterator[None]:
    """Forget the symbols made inside that nobody bound: their values are thrown away.

    Otherwise torch would require them in the results of the next trace. If torch renames the list, graphs with such
    sizes raise in AOTAutograd.
    """
    pending = getattr(shapes, "pending_fresh_unbacked_symbols", [])
    before = list(pending)
    try:
        yield
    finally:
        pending[:] = before


@contextmanager
def size_oblivious(shapes: ShapeEnv | None) -> Iterator[None]:
    """Answer questions about sizes that depend on values as for sizes of 2 or more, as torch.export does.

    torch's C++ code asks, for example, whether a tensor is empty. If torch renames the method, such questions raise as
    they do outside.
    """
    own = getattr(shapes, "evaluate_sym_node", None)
    if own is None:
        yield
        return

    def answer(node: Any, size_oblivious: bool = False, fallback_value: bool | None = None) -> Any:
        return own(node, size_oblivious=True, fallback_value=fallback_value)

    shapes.evaluate_sym_node = answer  # type: ignore[union-attr,method-assign]
    try:
        yield
    finally:
        del shapes.evaluate_sym_node  # type: ignore[union-attr]


def size_reader(size: int | torch.SymInt, inputs: Sequence[Any]) -> Callable[[Sequence[Any]], int] | None:
    """Return what computes ``size`` from the inputs of a run; None if it depends on values.

    ``inputs``: the values of the graph's inputs, in their order: tensors, sizes and others. Breaks loudly.
    """
    if not isinstance(size, torch.SymInt):
        return lambda _: size
    places: dict[Any, tuple[int, int | None]] = {}
    for at, value in enumerate(inputs):
        sizes = [(None, value), *enumerate(value.shape)] if isinstance(value, torch.Tensor) else [(None, value)]
        for dim, number in sizes:
            if isinstance(number, torch.SymInt):
                places.setdefault(number.node.expr, (at, dim))
    expression = size.node.expr
    if not expression.free_symbols <= places.keys():
        return None
    reading = {symbol: places[symbol] for symbol in expression.free_symbols}

    def read(args: Sequence[Any]) -> int:
        numbers = {s: args[at] if dim is None else args[at].shape[dim] for s, (at, dim) in reading.items()}
        return int(expression.subs(numbers))

    return read
