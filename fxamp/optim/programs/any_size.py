"""The program of one flat parameter for any number of elements, which Inductor compiles for a CPU.

State in blocks has a scale for every 256 elements. Inductor vectorizes a loop over the elements of one block, whose
scale is constant, but not one over all elements, which divides each index for the scale. So a program with such state
takes rows of one block each. It is called for some whole blocks at a time, and for the elements after them, one shorter
row. Its scales are int32: Inductor's vectors have no 16-bit integers.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic

from fxamp.kernels.blockwise_8bit import BLOCK, draw_key
from fxamp.passes.step.lift_scalars import NUMBERS
from fxamp.passes.step.pack_state import is_scales
from fxamp.torch_private import make_fx
from fxamp.torch_private.parts.dynamo import ConstantSource
from fxamp.torch_private.parts.fx import enable_python_dispatcher

SIZE_HINT = (1 << 20) + 77
"""The number of elements that Inductor assumes: enough to use several threads."""

ROW_SCALES = torch.int32
"""The dtype of the scales that a program of rows takes."""

_MOST_ROWS = 1 << 12
"""The rows of a call, a power of two. Its new state is in memory in float32 before it is packed, as a million elements
each: malloc returns larger blocks to the system, which zeroes their pages again in each step."""


def of_any_size(gm: GraphModule, mode: FakeTensorMode, decompositions: dict[Any, Any]) -> GraphModule:
    """Return the graph of a flat step for a symbolic number of elements, with its ops decomposed.

    With state in blocks its elements are rows, of a symbolic length too, and its last input is the 0-dim int32 index of
    the first element, on which random bits depend.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    sizes = [_symbol(mode, "numel", SIZE_HINT)]
    if any(map(is_scales, inputs)):
        sizes = [_symbol(mode, "rows", SIZE_HINT // BLOCK), _symbol(mode, "width", BLOCK)]
    with mode, torch.no_grad(), enable_python_dispatcher():
        values = [_of_size(node, sizes) for node in inputs]
        if len(sizes) == 1:
            return make_fx(Interpreter(gm).run, decompositions)(*values)
        first = torch.empty((), dtype=torch.int32, device="cpu")
        return make_fx(lambda *own: _FromElement(gm, own[-1]).run(*own[:-1]), decompositions)(*values, first)


def _symbol(mode: FakeTensorMode, name: str, hint: int) -> SymInt:
    environment, source = mode.shape_env, ConstantSource(name)
    assert environment is not None
    symbol = environment.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    size = environment.create_symintnode(symbol, hint=hint, source=source)
    assert isinstance(size, SymInt)
    return size


def _of_size(node: Node, sizes: Sequence[SymInt]) -> Any:
    value = node.meta["val"]
    if not _is_blocked(node):
        return value
    if is_scales(node):
        return torch.empty(sizes[:1], dtype=ROW_SCALES, device=value.device)
    return torch.empty(tuple(sizes), dtype=value.dtype, device=value.device)


class _FromElement(Interpreter):
    """Runs a step on the elements from ``first`` on, a multiple of a row's length; their random bits are their own."""

    def __init__(self, gm: GraphModule, first: Tensor) -> None:
        super().__init__(gm)
        self._first = first

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call_function(target, args, kwargs)
        # Random bits are a hash of index ^ key, and an index in a call's rows has no bits in common with ``first``.
        return result ^ self._first if target is draw_key.default else result


def serves_size(gm: GraphModule, mode: FakeTensorMode) -> Callable[..., bool]:
    """Return a predicate: whether code compiled from :func:`of_any_size`'s graph is valid for sizes of its elements."""
    import sympy  # type: ignore[import-untyped]

    sizes = [size.node.expr for size in gm.graph.find_nodes(op="placeholder")[0].meta["val"].shape]
    environment = mode.shape_env
    assert environment is not None
    guards = [guard.expr for guard in environment.guards if guard.expr.free_symbols & set(sizes)]

    @functools.cache
    def serves(*numbers: int) -> bool:
        known = {size: sympy.Integer(number) for size, number in zip(sizes, numbers, strict=True)}
        return all(guard.xreplace(known) == sympy.true for guard in guards)

    return serves


def for_every_size(
    gm: GraphModule, mode: FakeTensorMode, sized: GraphModule, compiled: Callable[..., Any]
) -> Callable[..., None]:
    """Return a step of one flat parameter: ``compiled``, or the flat step ``gm`` op by op for sizes that it lacks.

    ``sized``: the graph of :func:`of_any_size` that ``compiled`` was compiled from.
    """
    if any(map(is_scales, gm.graph.find_nodes(op="placeholder"))):
        return InRows.of(gm, mode, sized, compiled)
    serves = serves_size(sized, mode)

    def step(*inputs: Any) -> None:
        (compiled if serves(inputs[0].numel()) else gm)(*inputs)

    return step


@dataclass(frozen=True)
class InRows:
    """Calls a program of rows for one flat parameter.

    Attributes:
        compiled: the program.
        serves: whether it is valid for numbers of rows and of elements in a row.
        flat: the same step op by op, for other sizes.
        blocked: the positions of the inputs that have the parameter's elements, or their scales.
        scales: the positions of those that are scales.
        written: the positions of those that the step writes to.
    """

    compiled: Callable[..., Any]
    serves: Callable[..., bool]
    flat: Callable[..., Any]
    blocked: tuple[int, ...]
    scales: frozenset[int]
    written: frozenset[int]

    @classmethod
    def of(cls, gm: GraphModule, mode: FakeTensorMode, rows: GraphModule, compiled: Callable[..., Any]) -> "InRows":
        """``gm``: the flat step. ``rows``: the graph of it that ``compiled`` was compiled from."""
        inputs = gm.graph.find_nodes(op="placeholder")
        copies = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        targets = {copy.args[0] for copy in copies}
        return cls(
            compiled,
            serves_size(rows, mode),
            gm,
            tuple(at for at, node in enumerate(inputs) if _is_blocked(node)),
            frozenset(at for at, node in enumerate(inputs) if is_scales(node)),
            frozenset(at for at, node in enumerate(inputs) if node in targets),
        )

    def __call__(self, *inputs: Any) -> None:
        blocks, rest = divmod(inputs[0].numel(), BLOCK)
        parts = [(blocks, 1, rest)] if rest else []
        parts += [(start, min(_MOST_ROWS, blocks - start), BLOCK) for start in range(0, blocks, _MOST_ROWS)]
        if not all(self.serves(max(rows, 2), max(width, 2)) for _, rows, width in parts):
            self.flat(*inputs)
            return
        wide = {at: inputs[at].to(ROW_SCALES) for at in self.scales}
        for part in parts:
            # Each call advances the 0-dim values: all but the last get copies of them.
            last = part is parts[-1]
            values = [value.clone() if _is_number(value) and not last else value for value in inputs]
            self._step([wide.get(at, value) for at, value in enumerate(values)], *part)
        for at in self.scales & self.written:
            inputs[at].copy_(wide[at])

    def _step(self, inputs: list[Any], start: int, rows: int, width: int) -> None:
        """Step some rows; a single one as two equal ones, because the program is not valid for sizes of 1."""
        own = {}
        for at in self.blocked:
            if at in self.scales:
                own[at] = inputs[at].narrow(0, start, rows)
            else:
                own[at] = inputs[at].narrow(0, start * BLOCK, rows * width).view(rows, width)
        passed = own if rows > 1 else {at: _twice(part) for at, part in own.items()}
        values = [passed.get(at, value) for at, value in enumerate(inputs)]
        first = (start * BLOCK + 2**31) % 2**32 - 2**31  # as int32 counts elements
        self.compiled(*values, torch.tensor(first, dtype=torch.int32, device="cpu"))
        for at in self.written & own.keys() if rows == 1 else ():
            own[at].copy_(passed[at][:1] if at in self.scales else passed[at][:1, :width])


def _is_blocked(node: Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.dim() > 0 and node.target != NUMBERS


def _twice(part: Tensor) -> Tensor:
    """Return a copy of one row of elements or one scale as two; a row of one element as two of two elements."""
    return part.expand(2, *(max(size, 2) for size in part.shape[1:])).contiguous()


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.dim()
