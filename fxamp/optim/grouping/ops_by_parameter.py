"""The ops that a step performs on each parameter, recorded in one run over all parameters on fake tensors.

One program steps all parameters with equal ops. A value that is computed from the tensors of two parameters couples
them, and neither has ops of its own. A marker replaces sizes that equal the parameter's shape, so that the ops on
different shapes are equal unless they depend on the shape.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxamp.optim.errors import NotCompilableError
from fxamp.optim.reading.layout import OTHER, Layout
from fxamp.optim.tracing.trace import ops_on_lists, run_once, run_without_values

SIZES = "sizes"


def ops_by_parameter(
    optimizer: torch.optim.Optimizer, layout: Layout, stand_ins: Sequence[Tensor] = ()
) -> list[Hashable | None]:
    """Return the ops on each parameter; None without a gradient, or if the step couples it to another parameter.

    ``stand_ins``: tensors with the shapes to run with; by default the layout's, for DTensors those of the whole.

    Raises:
        NotCompilableError: the step cannot be run on fake tensors.
    """
    tensors = stand_ins or layout.whole_tensors()
    recorder = run_without_values(tensors, lambda fakes: _recorded(optimizer, layout, fakes))
    result: list[Hashable | None] = []
    for at, (parameter, gradient) in enumerate(zip(tensors, layout.gradients, strict=False)):
        free = gradient is not None and not {at, OTHER} & recorder.coupled
        result.append(_shapeless(tuple(recorder.ops.get(at, [])), tuple(parameter.shape)) if free else None)
    return result


def _recorded(optimizer: torch.optim.Optimizer, layout: Layout, tensors: list[Tensor]) -> "_Recorder":
    owned = zip(tensors, layout.roles(), strict=True)
    recorder = _Recorder({id(tensor): (tensor, at, (name, tensor.dtype)) for tensor, (at, name) in owned})
    with recorder:
        run_once(optimizer, layout, tensors, layout.floats())
    return recorder


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the ops by the parameter that their inputs belong to.

    ``owned``: by id, each input, the position of its parameter, and its name, as in :meth:`Layout.roles`.
    """

    def __init__(self, owned: dict[int, tuple[Tensor, int | None, Hashable]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: dict[int, list[Hashable]] = {}
        self.coupled: set[int] = set()
        # Keeps the tensors alive, so that no new tensor reuses an id.
        self._known = owned
        # Numbers that the step reads from tensors, in order: symbol -> owner and name.
        self._read: dict[Any, tuple[int | None, Hashable]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ops_on_lists():
            with self:
                return ops_on_lists()[func](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        owners: set[int] = set()
        line = (func, *(self._token(item, owners) for item in args), self._token(kwargs or {}, owners))
        if len(owners) > 1:
            self.coupled |= owners
        owner = next(iter(owners), None)
        name: Hashable = line
        if owner is not None:
            ops = self.ops.setdefault(owner, [])
            ops.append(line)
            name = len(ops)
        for at, item in enumerate(result if isinstance(result, (list, tuple)) else [result]):
            if isinstance(item, Tensor):
                self._known[id(item)] = (item, owner, (name, at))
            elif isinstance(item, (SymFloat, SymInt)):
                self._read[item.node.expr] = (owner, name)
        if owner is None and func._schema.is_mutable:
            # A value that belongs to no single parameter changes, so later reads of it depend on the order of ops.
            self.coupled.add(OTHER)
        return result

    def _token(self, value: Any, owners: set[int]) -> Hashable:
        if isinstance(value, Tensor):
            known = self._known.get(id(value))
            if known is None:
                return self._constant(value)
            if known[1] is not None:
                owners.add(known[1])
            return known[2]
        if isinstance(value, (list, tuple)):
            sizes = bool(value) and all(type(item) is int for item in value)
            return (SIZES, *value) if sizes else tuple(self._token(item, owners) for item in value)
        if isinstance(value, dict):
            return tuple((key, self._token(item, owners)) for key, item in sorted(value.items()))
        if isinstance(value, (SymFloat, SymInt)):
            return self._expression(value.node.expr, owners)
        return (type(value), value)

    def _constant(self, value: Tensor) -> Hashable:
        if value.numel() != 1 or value.is_meta:
            raise NotCompilableError("its step reads a tensor that is neither a parameter nor state")
        return ("constant", value.dtype, tuple(value.shape), value.item())

    def _expression(self, expression: Any, owners: set[int]) -> Hashable:
        """Return an expression of numbers that were read, with the names of the values they were read from."""
        symbols = [symbol for symbol in self._read if symbol in expression.free_symbols]
        owners.update(owner for owner, _ in map(self._read.__getitem__, symbols) if owner is not None)
        numbered = expression.xreplace({symbol: type(symbol)(f"read{at}") for at, symbol in enumerate(symbols)})
        return (str(numbered), *(self._read[symbol][1] for symbol in symbols))


def _shapeless(value: Any, shape: tuple[int, ...]) -> Any:
    """Return ``value`` with every list of sizes equal to ``shape`` replaced by a marker."""
    if not isinstance(value, tuple):
        return value
    if value == (SIZES, *shape):
        return SIZES
    return tuple(_shapeless(item, shape) for item in value)
