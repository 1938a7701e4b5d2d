"""The step of one kind of parameters, or of several that share a program, traced once for each kind.

On a GPU the program is a generated Triton kernel, launched once for all parameters. On a CPU Inductor compiles it for
flat tensors of any size, and it is called for each parameter. With the lowering "aot_eager" its graph runs op by op for
each parameter.
"""

import keyword
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxamp.capture import Captured
from fxamp.kernels.codes import DECOMPOSITIONS
from fxamp.kernels.dispatch import Implementation, implementation
from fxamp.kernels.step_launch import StepKernel
from fxamp.kernels.step_source import KERNEL_NAMES, NotGeneratedError, StepInputs
from fxamp.observe import CompiledStep, observed
from fxamp.optim.borrow import RefusedError
from fxamp.optim.kinds import same_order
from fxamp.optim.lower import Numbers, StepOptions, by_inductor, decompositions, generates, must_lift, step_passes
from fxamp.optim.packed import in_memory_order
from fxamp.optim.precision import Precision, keys, parts_of
from fxamp.optim.share import Share
from fxamp.optim.trace import Traced, of_any_size, serves_size
from fxamp.passes.base import Context
from fxamp.passes.step.fold_unscale import COEFFICIENT, INVERSE
from fxamp.passes.step.guard_updates import FLAG
from fxamp.passes.step.lift_scalars import NUMBERS
from fxamp.passes.step.pack_state import NOISE, ROLE
from fxamp.pipeline import run_passes
from fxamp.pipeline.dumps import stages_by_environment
from fxamp.pipeline.list_graph import list_graph

SHARED = (INVERSE, COEFFICIENT, FLAG)

Run = Callable[[list[list[Tensor]], list[list[Any]], Sequence[Tensor]], None]


@dataclass(frozen=True, eq=False)
class KindStep:
    """The compiled step of the kinds that share a program.

    Attributes:
        shares: the kinds; the program is the first one's.
        run: takes each member's tensors, each member's numbers, and the factors and the flag.
        places: for each kind, the indices of each member's tensors among the layout's tensors.
        numbers: for each kind, its lifted floats on the device; none if floats are passed as Python numbers.
        source: the generated source code; None for "aot_eager".
        noise: the keys of random bits; None if nothing is rounded by chance.
    """

    shares: tuple[Share, ...]
    run: Run
    places: tuple[tuple[tuple[int, ...], ...], ...]
    numbers: "tuple[Numbers, ...]"
    source: str | None
    noise: "Noise | None" = None

    @property
    def traced(self) -> Traced:
        """The trace of one flat parameter that the program was generated from."""
        return self.shares[0].traced

    def serves(self, floats: Sequence[float]) -> bool:
        """Whether the program is valid for these settings."""
        return all(share.serves(floats) for share in self.shares)

    def require_inputs(self, tensors: Sequence[Tensor]) -> None:
        """Raise AssertionError unless the program reads a parameter's tensors in the dtypes that they have."""
        given = [part.dtype for part in parts_of(tensors)] + ([] if self.noise is None else [torch.int32])
        values = [node.meta["val"] for node in self.traced.module.graph.find_nodes(op="placeholder")[: len(given)]]
        assert given == [value.dtype for value in values], "a step's program reads other dtypes than it is given"

    def given(self, floats: Sequence[float]) -> list[list[Any]]:
        """Return the numbers that the program reads, for each kind, in the form that it takes."""
        lists = [self.traced.inputs(share.given(floats)) for share in self.shares]
        return [[each.on_device(own)] for each, own in zip(self.numbers, lists, strict=True)] if self.numbers else lists

    @torch.no_grad()
    def __call__(self, tensors: Sequence[Tensor], floats: Sequence[float], extras: Sequence[Tensor]) -> None:
        numbers = zip(self.given(floats), self.places, strict=True)
        given = [own for own, members in numbers for _ in members]
        members = [places for kind in self.places for places in kind]
        rows = [list(parts_of(_aligned([tensors[place] for place in places]))) for places in members]
        if self.noise is not None:
            rows = [[*row, key] for row, key in zip(rows, self.noise.drawn(), strict=True)]
        elements = None if self.source is None else sum(row[0].numel() for row in rows)
        with observed(CompiledStep(self.source, elements)):
            self.run(rows, given, extras)


def _aligned(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors, with the gradient in the parameter's memory order."""
    parameter, gradient = tensors[:2]
    if not same_order(parameter, gradient):
        tensors[1] = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
    return tensors


class Noise:
    """A key for each parameter of a kind, 0-dim int32 on its device, in the same memory in every step."""

    def __init__(self, precision: Precision, members: Sequence[int], device: torch.device) -> None:
        self._precision, self._members = precision, members
        self._kept = torch.zeros(len(members), dtype=torch.int32, device=device)

    def drawn(self) -> tuple[Tensor, ...]:
        """The keys of this step; waits for no device."""
        drawn = keys(self._precision, self._members)
        self._kept.copy_(drawn.pin_memory() if self._kept.is_cuda else drawn, non_blocking=True)
        return self._kept.unbind()


def lower_kinds(
    shares: Sequence[Share],
    options: StepOptions,
    places: Sequence[Sequence[int]],
    precision: Precision | None = None,
) -> KindStep:
    """Rewrite the graph of the first kind and make it run for all of them.

    ``places``: for each parameter, the indices of its tensors; ``precision``: what is asked.

    Raises:
        RefusedError: an op is not pointwise, or no kernel can be generated for it.
    """
    traced = shares[0].traced
    gm = traced.module
    lift = must_lift(gm, options)
    device = next(iter(gm.graph.nodes)).meta["val"].device
    kernel = options.lowering == "inductor" and generates(device)
    passes = step_passes(options, lift, kind=True, for_kernel=kernel, packed=shares[0].packed)
    run_passes(Captured(gm, traced.mode), Context(traced.mode), passes)
    _require_pointwise(gm)
    stages = stages_by_environment()
    stages.graph("optimizer", lambda: list_graph(gm, stage="optimizer"))
    numbers = tuple(Numbers(device) for _ in shares) if lift and traced.symbols else ()
    run, source = _lowered(gm, traced, options, kernel, implementation(device) is Implementation.INTERPRETER)
    if source is not None:
        stages.text("optimizer_kernels", lambda: source)
    noisy = any(node.target == NOISE for node in gm.graph.find_nodes(op="placeholder"))
    members = [at for share in shares for at in share.kind.members]
    noise = Noise(precision, members, device) if noisy and precision is not None else None
    own = tuple(tuple(tuple(places[at]) for at in share.kind.members) for share in shares)
    return KindStep(tuple(shares), run, own, numbers, source, noise)


def _lowered(
    gm: GraphModule, traced: Traced, options: StepOptions, kernel: bool, interpret: bool
) -> tuple[Run, str | None]:
    if kernel:
        try:
            generated = StepKernel(gm, kernel_inputs(gm), interpret)
        except NotGeneratedError as why:
            raise RefusedError(f"no kernel can be generated: {why}") from why
        return _all_at_once(generated), generated.texts[True]
    if options.lowering == "aot_eager":
        return _for_each(gm), None
    if device_type(gm) != "cpu":
        raise RefusedError(f"parameters on {device_type(gm)} need Triton for their own kernel")
    table = decompositions(options) | DECOMPOSITIONS
    sized = of_any_size(gm, traced.mode, table)
    compiled, source = by_inductor(sized, traced, options)
    return _for_each(compiled, gm, serves_size(sized, traced.mode)), source


def device_type(gm: GraphModule) -> str:
    """Return the device type of the graph's inputs."""
    return str(next(iter(gm.graph.nodes)).meta["val"].device.type)


def _all_at_once(generated: StepKernel) -> Run:
    def run(rows: list[list[Tensor]], given: list[list[Any]], extras: Sequence[Tensor]) -> None:
        generated([[*row, *own] for row, own in zip(rows, given, strict=True)], extras)

    return run


def _for_each(
    compiled: Callable[..., Any], other: Callable[..., Any] | None = None, serves: Callable[[int], bool] | None = None
) -> Run:
    """Call ``compiled`` for each parameter, or ``other`` for the sizes that it does not serve."""

    def run(rows: list[list[Tensor]], given: list[list[Any]], extras: Sequence[Tensor]) -> None:
        for row, own in zip(rows, given, strict=True):
            chosen = compiled if other is None or serves is None or serves(row[0].numel()) else other
            chosen(*map(in_memory_order, row), *own, *extras)

    return run


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
    """Raise RefusedError unless each result element depends only on 0-dim values and elements at the same index."""
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.target in _PLACED:
            continue
        value = node.meta.get("val")
        tags = getattr(node.target, "tags", ())
        pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
        if isinstance(value, Tensor) and not pointwise and _reads_flat(node):
            raise RefusedError(f"its step calls {node.target}, which is not pointwise")


def _reads_flat(node: Node) -> bool:
    values = [source.meta.get("val") for source in node.all_input_nodes]
    return any(isinstance(value, Tensor) and value.dim() for value in values)


aten, prims = torch.ops.aten, torch.ops.prims
_PLACED = frozenset(DECOMPOSITIONS) | {
    aten.copy_.default,
    aten.copy.default,
    prims.convert_element_type.default,
    aten.select.int,
}
"""Ops that work element by element, or block by block, although torch does not tag them as pointwise."""
