"""Let groups whose steps differ only in numbers share one program.

1. Two programs are the same if each writes the same values to the same inputs once the numbers of one group replace
   those of the other.
2. A program with weight decay also serves a group without it: 1 - lr * 0 is 1, and multiplying by 1 changes no bit. The
   zeros of that group must then stay zeros.

So AdamW with decayed weights and biases without decay is one kernel, launched once.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import SymFloat, Tensor
from torch.fx import Node

from fxamp.optim.grouping.parameter_kinds import ParameterKind
from fxamp.optim.reading.layout import Layout
from fxamp.optim.tracing.trace import Traced
from fxamp.passes.step.pack_state import ROLE, PackState

aten = torch.ops.aten

Path = tuple[Hashable, ...]


@dataclass(frozen=True, eq=False)
class ProgramUse:
    """How one kind uses a program, its own or that of another kind.

    Attributes:
        kind, traced, packed: the kind, its trace, and its packed state, as for a program of its own.
        sources: for floats of the settings that the program reads, the index of the kind's own, or its value.
        zeros: the kind's floats that must be zero for it to use this program.
    """

    kind: ParameterKind
    traced: Traced
    packed: PackState | None = None
    sources: Mapping[int, int | float] = field(default_factory=dict)
    zeros: tuple[int, ...] = ()

    def serves(self, floats: Sequence[float]) -> bool:
        """Whether the program is valid for these settings."""
        return self.traced.serves(floats) and all(floats[at] == 0 for at in self.zeros)

    def translated(self, floats: Sequence[float]) -> list[float]:
        """Return the floats of all settings as the program reads them for this kind."""
        result = list(floats)
        for at, own in self.sources.items():
            result[at] = floats[own] if isinstance(own, int) else own
        return result


def group_by_program(kinds: Sequence[ProgramUse], layout: Layout) -> list[list[ProgramUse]]:
    """Group a layout's kinds by the program that serves them; the first one of each list is compiled.

    A kind whose settings hold tensors shares no program.
    """
    if layout.setting_tensors():
        return [[kind] for kind in kinds]
    numbers, groups = _numbers(layout.settings), layout.group_of()
    programs: list[list[ProgramUse]] = []
    for kind in kinds:
        for program in programs:
            joined = _joined(program[0], kind, groups, numbers)
            if joined is not None:
                program.append(joined)
                break
            others = [_joined(kind, member, groups, numbers) for member in program]
            if all(others):
                program[:] = [kind, *(other for other in others if other is not None)]
                break
        else:
            programs.append([kind])
    return programs


@dataclass(frozen=True)
class _Number:
    """A number of a group's settings; ``index`` among all floats, None for an int."""

    index: int | None
    value: float


def _numbers(settings: Sequence[Mapping[str, Any]]) -> list[dict[Path, _Number]]:
    """Return each group's numbers by their place in its settings, in the order of ``Layout.floats``."""
    count = 0

    def visit(value: Any, path: Path, numbers: dict[Path, _Number]) -> None:
        nonlocal count
        if type(value) in (tuple, list):
            for at, item in enumerate(value):
                visit(item, (*path, at), numbers)
        elif type(value) is float:
            numbers[path] = _Number(count, value)
            count += 1
        elif type(value) is int:
            numbers[path] = _Number(None, float(value))

    result: list[dict[Path, _Number]] = []
    for group in settings:
        result.append({})
        for name, value in group.items():
            visit(value, (name,), result[-1])
    return result


def _joined(
    base: ProgramUse, kind: ProgramUse, groups: Sequence[int], numbers: list[dict[Path, _Number]]
) -> ProgramUse | None:
    """Return how the kind uses the program of ``base``; None if it needs another program.

    Both traces are read with the values of their ops numbered in one table, so that equal values have equal numbers
    (value numbering). A float of the base is read as the kind's float at the same place of its group's settings.
    """
    own, other = (numbers[groups[use.kind.members[0]]] for use in (base, kind))
    floats = {path: number.index for path, number in own.items() if number.index is not None}
    if base.packed != kind.packed or not floats.keys() <= other.keys():
        return None
    places = {at: other[path] for path, at in floats.items()}
    fixed = _fixed(kind.traced)
    # Rule 2: if a guard fixes the kind's number to zero, the base's symbol is zero too, and 1 - lr * 0 is the literal
    # 1.
    zeros = {at: n for at, n in places.items() if n.value == 0 and (n.index is None or n.index in fixed)}
    values: dict[Hashable, int] = {}
    names = {number.index: at for at, number in places.items() if number.index is not None}
    writes = _Values(kind.traced, values, names).writes()
    if _Values(base.traced, values, {at: at for at in places}, frozenset(zeros)).writes() != writes:
        return None
    sources = {at: number.value if number.index is None else number.index for at, number in places.items()}
    own_zeros = tuple(number.index for number in zeros.values() if number.index is not None)
    return ProgramUse(kind.kind, kind.traced, kind.packed, sources, own_zeros)


def _fixed(traced: Traced) -> set[int]:
    """Return the indices of the floats whose value a guard fixes."""
    floats = (node.meta["val"] for node in traced.module.graph.find_nodes(op="placeholder"))
    values = [value for value in floats if isinstance(value, SymFloat)]
    return {at for at, value in zip(traced.lifted, values, strict=True) if value.node.expr.is_number}


class _Values:
    """Numbers the values of a graph: equal numbers mean equal values. ``values`` may be shared with another graph.

    ``names``: a name for each float of the kind's own group, by its index; ``zeros``: floats that are zero.
    """

    def __init__(
        self, traced: Traced, values: dict[Hashable, int], names: Mapping[int, int], zeros: frozenset[int] = frozenset()
    ) -> None:
        import sympy  # type: ignore[import-untyped]

        self._traced, self._values, self._names = traced, values, names
        indices = dict(zip(traced.symbols, traced.lifted, strict=True))
        self._zeros = {symbol: sympy.Integer(0) for symbol, at in indices.items() if at in zeros}
        self._of: dict[Node, Hashable] = {}
        first = next(iter(traced.module.graph.nodes)).meta["val"]
        self._size = tuple(first.shape)

    def writes(self) -> dict[Hashable, Hashable]:
        """Return the value that is written to each input."""
        written: dict[Hashable, Hashable] = {}
        tensors, floats = 0, iter(self._traced.lifted)
        for node in self._traced.module.graph.nodes:
            value = node.meta.get("val")
            if node.op == "placeholder" and isinstance(value, Tensor):
                self._of[node] = ("input", tensors, value.dtype, value.dim(), node.meta.get(ROLE))
                tensors += 1
            elif node.op == "placeholder":
                at = next(floats)
                name = ("float", self._names[at]) if at in self._names else ("another group's float", at)
                self._of[node] = self._literal(value) or name
            elif node.op == "call_function" and node.target is aten.copy_.default:
                written[self._of[node.args[0]]] = self._of[node.args[1]]
            elif node.op == "call_function":
                self._of[node] = self._value(node)
        return written

    def _literal(self, value: Any) -> Hashable | None:
        """Return a number that is known when the graph is made; None for anything else."""
        if not isinstance(value, SymFloat):
            return None
        number = value.node.expr.xreplace(self._zeros)
        return ("number", float(number)) if number.is_number else None

    def _value(self, node: Node) -> Hashable:
        literal = self._literal(node.meta.get("val"))
        if literal is not None:
            return literal
        key = (node.target, self._token(node.args), self._token(node.kwargs))
        if node.target in (aten.mul.Tensor, aten.mul.Scalar):
            for factor, other in (node.args[:2], node.args[1::-1]):
                if self._token(factor) == _ONE and isinstance(other, Node) and _alike(node, other):
                    return self._of[other]
        return self._values.setdefault(key, len(self._values))

    def _token(self, value: Any) -> Hashable:
        if isinstance(value, Node):
            return self._of[value]
        if isinstance(value, (list, tuple)):
            return "size" if tuple(value) == self._size else tuple(map(self._token, value))
        if isinstance(value, dict):
            return tuple((name, self._token(item)) for name, item in sorted(value.items()))
        return ("number", float(value)) if type(value) is float else (type(value), value)


_ONE = ("number", 1.0)


def _alike(one: Node, other: Node) -> bool:
    first, second = one.meta.get("val"), other.meta.get("val")
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return False
    return first.dtype == second.dtype and first.shape == second.shape
