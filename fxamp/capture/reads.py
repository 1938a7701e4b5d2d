"""Check that a captured graph reads what the program reads: each value is the one that the program's call computed.

The tracer finds the node of a value by its tensor object. If two values are one object, because a value was returned
twice or taken from a cache, the tracer confuses them, and a gradient is silently wrong.
"""

import operator
from collections.abc import Iterable

from torch._ops import OpOverload
from torch.fx import Node

from fxamp.errors import CaptureError
from fxamp.graph import arguments, describe_source, fake_tensors, is_mutable, op_name, writes
from fxamp.torch_private.parts.fx import py_sym_types


class Reads:
    """The nodes of a new graph that stand for each value of the traced one."""

    def __init__(self) -> None:
        self._made: dict[Node, list[Node]] = {}
        self._stand_for: dict[Node, set[Node]] = {}
        self._written: dict[Node, set[Node]] = {}

    def record(self, call: Node, made: Iterable[Node], holds_input: bool = False) -> None:
        """Record the new nodes ``made`` for ``call``, a node of the traced graph; its result may be or hold an input.

        A placeholder has one new node, that of its position.
        """
        self._made[call] = list(made)
        stand_for = set(self._made[call])
        if holds_input or not stand_for:
            stand_for.update(node for source in call.all_input_nodes for node in self._stand_for[source])
        self._stand_for[call] = stand_for

    def require_own(self) -> None:
        """Raise CaptureError if a new node reads a value that was made for no input of its call.

        Sizes do not count: they are computed where they are first needed.
        """
        for call, made in self._made.items():
            if call.op == "placeholder":
                continue
            for node in made:
                sized = isinstance(node.meta.get("val"), (*py_sym_types, bool, int, float))
                for read in () if sized else node.all_input_nodes:
                    if read not in made and not any(self._is(read, source) for source in call.all_input_nodes):
                        raise _mistaken(node, read, call)

    def require(self, node: Node, source: Node) -> None:
        """Raise CaptureError unless the new ``node`` stands for the value of ``source`` in the traced graph."""
        if not self._is(node, source):
            raise _mistaken(node, node, source)

    def _is(self, node: Node, source: Node) -> bool:
        if node.op == "get_attr" or not fake_tensors(node.meta.get("val")):
            return True
        targets = (target for own in self._stand_for[source] for target in self._targets(own))
        return not self._targets(node).isdisjoint(targets)

    def _targets(self, node: Node) -> set[Node]:
        """Return ``node`` and, if it is the result of a write, the tensor that was written to."""
        if node not in self._written:
            targets = [self._targets(target) for target in _written_results(node)]
            self._written[node] = {node}.union(*targets)
        return self._written[node]


def _written_results(node: Node) -> list[Node]:
    """Return the tensors that ``node`` returns after writing to them, or picks from a call that does."""
    if node.target is not operator.getitem:
        return writes(node) if is_mutable(node) else []
    call, index = node.args
    if not isinstance(call, Node) or not isinstance(index, int) or not isinstance(call.target, OpOverload):
        return []
    result = call.target._schema.returns[index].alias_info if index < len(call.target._schema.returns) else None
    if result is None or not result.is_write:
        return []
    outs = ((argument.alias_info, value) for argument, value in arguments(call))
    return [value for own, value in outs if own is not None and own.before_set & result.before_set]


def _mistaken(node: Node, read: Node, call: Node) -> CaptureError:
    return CaptureError(
        f"{op_name(node)} at {describe_source(node)} would read {read.name}, which is not the value that the program "
        f"reads ({call.name} = {call.target}). This is a bug in fxamp's capture: please report it. Until it is fixed, "
        "put torch.compiler.disable around this code"
    )
