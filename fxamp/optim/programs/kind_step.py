"""The step of one kind of parameters, or of several that share a program, traced once for each kind.

On a GPU the program is a generated Triton kernel, launched once for all parameters, after a kernel for 0-dim values. On
a CPU Inductor compiles it for flat tensors of any size, and it is called for each parameter, or for a batch of small
ones. With the lowering "aot_eager" its graph runs op by op for each parameter.
"""

import functools
import keyword
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxamp.graph import AliasSets, is_random
from fxamp.kernels.blockwise_8bit import DECOMPOSITIONS
from fxamp.kernels.dispatch import Implementation, implementation
from fxamp.optim.errors import NotCompilableError
from fxamp.optim.grouping.parameter_kinds import same_order
from fxamp.optim.grouping.shared_programs import ProgramUse
from fxamp.optim.kernels.expressions import NotGeneratedError
from fxamp.optim.kernels.launch import StepKernel, StepTarget
from fxamp.optim.kernels.step_triton import KERNEL_NAMES, StepInputs
from fxamp.optim.packed_tensor import PackedTensor, in_memory_order
from fxamp.optim.precision.state_precision import parts_of, streams
from fxamp.optim.programs.any_size import for_every_size, of_any_size
from fxamp.optim.programs.batch import Batch, Columns, batches
from fxamp.optim.programs.lowering import (
    Numbers,
    StepOptions,
    by_inductor,
    decompositions,
    device_of,
    generates,
    must_lift,
    rewrite_step,
)
from fxamp.optim.tracing.trace import Traced
from fxamp.passes.sequences import step
from fxamp.passes.step.fold_unscale import COEFFICIENT, INVERSE
from fxamp.passes.step.guard_updates import FLAG
from fxamp.passes.step.lift_scalars import NUMBERS
from fxamp.passes.step.pack_state import ROLE, STREAM
from fxamp.passes.step.spread_fills import FILLS

SHARED = (INVERSE, COEFFICIENT, FLAG)

#: Steps the members. It takes what returns the columns of their tensors, each kind's numbers, the factors and the flag,
#: and the addresses of all of the layout's tensors, or None.
Run = Callable[[Callable[[], Columns], list[list[Any]], Sequence[Tensor], list[int] | None], None]


@dataclass(frozen=True)
class Members:
    """The parameters of the kinds that share a program, and the positions of their tensors among the layout's.

    Attributes:
        kinds: for each parameter, the index of its kind.
        columns: for each input of the program, the indices of all parameters' tensors.
        numels: the number of elements of each.
        reordered: the members whose gradient has a different memory order than the parameter.
    """

    kinds: tuple[int, ...]
    columns: tuple[tuple[int, ...], ...]
    numels: tuple[int, ...]
    reordered: tuple[int, ...]

    @classmethod
    def of(cls, uses: Sequence[ProgramUse], places: Sequence[Sequence[int]], tensors: Sequence[Tensor]) -> "Members":
        """``places``: for each parameter of the layout, the indices of its tensors among ``tensors``."""
        rows = [(kind, places[at]) for kind, use in enumerate(uses) for at in use.kind.members]
        pairs = [(tensors[row[0]], tensors[row[1]]) for _, row in rows]
        return cls(
            tuple(kind for kind, _ in rows),
            tuple(zip(*(row for _, row in rows), strict=True)),
            tuple(parameter.numel() for parameter, _ in pairs),
            tuple(at for at, pair in enumerate(pairs) if not same_order(*pair)),
        )

    def tensors(self, every: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Return the columns, gradients in their parameters' memory order, and the parts of what is packed."""
        columns: list[Sequence[Tensor]] = []
        for column in (read(every) for read in self._readers):
            packed = isinstance(column[0], PackedTensor)  # like all of a column, which have one form
            columns += zip(*(value.parts for value in column), strict=True) if packed else (column,)  # type: ignore[attr-defined]
        if self.reordered:
            columns[1] = list(columns[1])
        for at in self.reordered:
            parameter, gradient = columns[0][at], columns[1][at]
            columns[1][at] = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)  # type: ignore[index]
        return columns

    @cached_property
    def _readers(self) -> list[Callable[[Sequence[Tensor]], Sequence[Tensor]]]:
        return [
            itemgetter(*places) if len(places) > 1 else itemgetter(slice(places[0], places[0] + 1))
            for places in self.columns
        ]


@dataclass(frozen=True, eq=False)
class KindStep:
    """The compiled step of the kinds that share a program.

    Attributes:
        uses: the kinds; the program is the first one's.
        run: steps the members.
        members: the parameters.
        numbers: for each kind, its lifted floats on the device; none if floats are passed as Python numbers.
        source: the generated source code; None for "aot_eager".
        launches: whether a kernel reads the layout's own tensors, so that their addresses show if one has moved.
        streams: for each member, 0-dim int32 on its device; none if nothing is rounded stochastically.
    """

    uses: tuple[ProgramUse, ...]
    run: Run
    members: Members
    numbers: "tuple[Numbers, ...]"
    source: str | None
    launches: bool
    streams: tuple[Tensor, ...] = ()

    @property
    def traced(self) -> Traced:
        """The trace of one flat parameter that the program was generated from."""
        return self.uses[0].traced

    def serves(self, floats: Sequence[float]) -> bool:
        """Whether the program is valid for these settings."""
        return all(use.serves(floats) for use in self.uses)

    def require_inputs(self, tensors: Sequence[Tensor]) -> None:
        """Raise AssertionError unless the program reads a parameter's tensors in the dtypes that they have."""
        dtypes = [part.dtype for part in parts_of(tensors)] + ([torch.int32] if self.streams else [])
        values = [node.meta["val"] for node in self.traced.module.graph.find_nodes(op="placeholder")[: len(dtypes)]]
        assert dtypes == [value.dtype for value in values], "a step's program reads different dtypes than it gets"

    def numbers_by_kind(self, floats: Sequence[float]) -> list[list[Any]]:
        """Return the numbers that the program reads, for each kind, in the form that it takes."""
        lists = [self.traced.inputs(use.translated(floats)) for use in self.uses]
        return [[on.on_device(own)] for on, own in zip(self.numbers, lists, strict=True)] if self.numbers else lists

    @torch.no_grad()
    def __call__(
        self,
        tensors: Sequence[Tensor],
        floats: Sequence[float],
        extras: Sequence[Tensor],
        addresses: list[int] | None = None,
    ) -> None:
        def columns() -> Columns:
            own = self.members.tensors(tensors)
            return [*own, self.streams] if self.streams else own

        self.run(columns, self.numbers_by_kind(floats), extras, addresses if self.launches else None)


def lower_kinds(
    uses: Sequence[ProgramUse], options: StepOptions, places: Sequence[Sequence[int]], tensors: Sequence[Tensor]
) -> KindStep:
    """Rewrite the graph of the first kind and make it run for all of them.

    ``places``: for each parameter, the indices of its tensors among ``tensors``.

    Raises:
        NotCompilableError: an op is not pointwise, or no kernel can be generated for it.
    """
    traced = uses[0].traced
    gm = traced.module
    lift = must_lift(gm, options)
    device = device_of(gm)
    kernel = options.lowering == "inductor" and generates(device)
    inductor = options.lowering == "inductor" and not kernel
    passes = step(options, lifted=lift, for_inductor=inductor, flat=True, packed=uses[0].packed)
    _require_pointwise(gm)
    stages = rewrite_step(traced, passes)
    numbers = tuple(Numbers(device) for _ in uses) if lift and traced.symbols else ()
    members = Members.of(uses, places, tensors)
    if members.reordered and traced.writes_gradients:
        raise NotCompilableError("it writes to its gradient, whose order of memory is not its parameter's")
    interpret = implementation(device) is Implementation.INTERPRETER
    kernel_for = StepTarget(members.numels, device, interpret) if kernel else None
    direct = not members.reordered and not any(isinstance(tensor, PackedTensor) for tensor in tensors)
    stochastic = any(node.target == STREAM for node in gm.graph.find_nodes(op="placeholder"))
    together = inductor and device.type == "cpu" and not stochastic
    small = tuple(_batches(gm, members, tensors)) if together else ()
    run, source = _lowered(gm, traced, options, kernel_for, members.kinds, small)
    if source is not None:
        stages.text("optimizer_kernels", lambda: source)
    positions = [at for use in uses for at in use.kind.members]
    seed = 0 if options.precision is None else options.precision.seed
    random_streams = streams(seed, positions).to(device).unbind() if stochastic else ()
    return KindStep(tuple(uses), run, members, numbers, source, kernel and direct, random_streams)


def _lowered(
    gm: GraphModule,
    traced: Traced,
    options: StepOptions,
    target: StepTarget | None,
    kinds: tuple[int, ...],
    small: tuple[Batch, ...],
) -> tuple[Run, str | None]:
    if target is not None:
        try:
            generated = StepKernel(gm, kernel_inputs(gm), target)
        except NotGeneratedError as why:
            raise NotCompilableError(f"no kernel can be generated: {why}") from why
        return _AllAtOnce(generated, kinds), generated.source
    if options.lowering == "aot_eager":
        return _for_each(gm, kinds), None
    if device_of(gm).type != "cpu":
        raise NotCompilableError(f"parameters on {device_of(gm).type} need Triton for their own kernel")
    table = decompositions(options) | DECOMPOSITIONS
    sized = of_any_size(gm, traced.mode, table)
    compiled, source = by_inductor(sized, traced)
    return _for_each(for_every_size(gm, traced.mode, sized, compiled), kinds, small), source


class _AllAtOnce:
    """Launches a kernel for all parameters; ``kinds``: the kind of each."""

    def __init__(self, generated: StepKernel, kinds: tuple[int, ...]) -> None:
        self._generated, self._kinds = generated, kinds
        self._spread = functools.lru_cache(maxsize=1)(self._spread_numbers)

    def __call__(
        self,
        columns: Callable[[], Columns],
        numbers: list[list[Any]],
        extras: Sequence[Tensor],
        addresses: list[int] | None,
    ) -> None:
        """Step; repeats the last launch if ``addresses`` are as they were, without reading the columns."""
        own = [list(map(Tensor.data_ptr, tensors)) for tensors in numbers]
        origin = None if addresses is None else (addresses, own)
        if origin is not None and self._generated.again(origin, extras):
            return
        read = columns()  # lives until the launch: some may be copies
        starts = [list(map(Tensor.data_ptr, column)) for column in read]
        self._generated([*starts, *self._spread(tuple(map(tuple, own)))], extras, origin)

    def _spread_numbers(self, own: tuple[tuple[int, ...], ...]) -> list[list[int]]:
        return [[own[kind][at] for kind in self._kinds] for at in range(len(own[0]))]


def _for_each(program: Callable[..., Any], kinds: tuple[int, ...], small: tuple[Batch, ...] = ()) -> Run:
    """Call ``program`` for each parameter or batch."""

    def run(
        columns: Callable[[], Columns], numbers: list[list[Any]], extras: Sequence[Tensor], _: list[int] | None
    ) -> None:
        read = columns()
        stepped = [batch for batch in small if batch.step(program, read, [*numbers[batch.kind], *extras])]
        done = {at for batch in stepped for at in batch.members}
        for at in [at for at in range(len(kinds)) if at not in done]:
            row = [in_memory_order(column[at]) for column in read]
            program(*row, *numbers[kinds[at]], *extras)

    return run


def _batches(gm: GraphModule, members: Members, tensors: Sequence[Tensor]) -> Iterator[Batch]:
    """Yield the members that are stepped together; none if some are packed."""
    columns = [[tensors[at] for at in column] for column in members.columns]
    aliases, inputs = AliasSets(gm.graph), gm.graph.find_nodes(op="placeholder")
    written = [aliases.mutated(node) for node, _ in zip(inputs, columns, strict=False)]
    if not any(isinstance(tensor, PackedTensor) for column in columns for tensor in column):
        yield from batches(members.kinds, columns, written)


def kernel_inputs(gm: GraphModule) -> StepInputs:
    nodes = gm.graph.find_nodes(op="placeholder")
    shared = {node: str(node.target) for node in nodes if node.target in SHARED}
    cells: dict[Node, str] = {}
    for node in nodes:
        if node not in shared:
            cells[node] = _cell_name(node, {*cells.values(), *shared.values(), *KERNEL_NAMES})
    return StepInputs(cells, shared)


def _cell_name(node: Node, taken: Collection[str]) -> str:
    """Return a name for the input in the kernel."""
    name = NUMBERS if node.target == NUMBERS else re.sub(r"\W", "_", node.meta[ROLE])
    return f"{name}_{len(taken)}" if name in taken or keyword.iskeyword(name) or not name[0].isalpha() else name


def _require_pointwise(gm: GraphModule) -> None:
    """Raise NotCompilableError unless elements depend only on 0-dim values and on elements at the same index."""
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.target in _PLACED:
            continue
        value = node.meta.get("val")
        tags = getattr(node.target, "tags", ())
        pointwise = torch.Tag.pointwise in tags or not _has_elements(node)
        if isinstance(value, Tensor) and (is_random(node) or not pointwise):
            raise NotCompilableError(f"its step calls {node.target}, which is not pointwise")


def _has_elements(node: Node) -> bool:
    """Whether a call reads or returns a tensor that is not 0-dim."""
    values = [source.meta.get("val") for source in (node, *node.all_input_nodes)]
    return any(isinstance(value, Tensor) and value.dim() for value in values)


aten, prims = torch.ops.aten, torch.ops.prims
_PLACED = frozenset(DECOMPOSITIONS) | {
    aten.copy_.default,
    aten.copy.default,
    prims.convert_element_type.default,
    aten.select.int,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    *FILLS,
}
"""Ops that work element by element, or block by block, although torch does not tag them as pointwise."""
