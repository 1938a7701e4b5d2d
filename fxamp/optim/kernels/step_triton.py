"""Generate, from the graph of one parameter's step, a Triton kernel that steps all parameters of its kind.

Each element is read once, computed on its own, and written once. 0-dim values (counters, powers of beta, settings) that
the graph computes in float64 come from the kernel of :mod:`fxamp.optim.kernels.scalars`, which runs first and writes
the counters; every program computes the other ones. A skipped step handles no elements.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from fxamp.kernels.blockwise_8bit import BLOCK, DECOMPOSITIONS, SCALES, block_scales, decode, draw_key, stochastic_round
from fxamp.kernels.gradient_triton import CARRIER, WIDEN, indented
from fxamp.kernels.launch_plan import ALIGNMENT, CHUNK
from fxamp.optim.kernels.blockwise_8bit_triton import (
    decode_lines,
    encode_lines,
    key_lines,
    scales_lines,
    stochastic_round_lines,
)
from fxamp.optim.kernels.expressions import CARRIED, Expressions, NotGeneratedError, rounded, value_dtype
from fxamp.optim.kernels.scalar_nodes import is_flat, is_numbers, prepared_nodes, skipping
from fxamp.passes.step.pack_state import is_scales

aten = torch.ops.aten

NAME = "optimizer_step"

KERNEL_NAMES = frozenset(
    {"table", "blocks", "scalars", "program", "which", "row", "first", "numel", "left", "start", "offsets", "inside"}
    | {"own", "tl", "triton", "inv_scale", "clip_coefficient", "found_inf", NAME, "step_scalars"}
)
"""Names that the kernel uses for other things."""

HEAD = '''\
"""An optimizer's step, for all parameters of one kind.

Aligned to {alignment} bytes: {aligned}. Written by fxamp.optim.kernels, not to be edited.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment={unaligned})
def {name}({parameters}):
    program = tl.program_id(0)
    which = tl.load(blocks + 2 * program)
    row = table + {row} * which
    first = tl.load(blocks + 2 * program + 1) * {chunk}  # times a constant, so the compiler sees that it is aligned
    numel = tl.load(row + {numel})
    left = tl.minimum(numel - first, {chunk}).to(tl.int32)
'''


GRADIENT = "gradient"
"""The name of the gradient's cell."""


class Aligned(enum.Enum):
    """Which tensors with dimensions start at multiples of 16 bytes.

    ``BUT_GRADIENT``: all tensors but the gradient, for example if gradients are views into DDP's buckets. Only tensors
    that are not aligned are read one element at a time.
    """

    ALL = "yes"
    BUT_GRADIENT = "all but the gradient"
    NONE = "no"


@dataclass(frozen=True)
class StepInputs:
    """How the graph's inputs are passed to the kernel.

    Attributes:
        cells: inputs in the row of each parameter, with their name in the kernel, in the order of the cells.
        shared: 0-dim inputs that are the same for all parameters, with their name as parameters of the kernel.
    """

    cells: Mapping[Node, str]
    shared: Mapping[Node, str]


def step_parameters(gm: GraphModule, inputs: StepInputs) -> dict[str, str]:
    """Return the kernel's parameters, in order, each with its Triton type."""
    prepared = {"scalars": "*i64"} if prepared_nodes(gm) else {}
    return {"table": "*i64", "blocks": "*i64", **prepared, **dict.fromkeys(inputs.shared.values(), "*fp32")}


def step_text(gm: GraphModule, inputs: StepInputs, aligned: Aligned, block: int) -> str:
    """Return the Python module that defines the kernel :data:`NAME`.

    Args:
        gm: functional; its only writes are final ``copy_`` to inputs; all ops are pointwise, all values flat or 0-dim.
        inputs: where the kernel reads its inputs. A row of the table has their addresses, then the number of elements.
        aligned: which addresses are multiples of 16 bytes.
        block: the number of elements that a program handles at a time; it divides ``CHUNK``.

    Raises:
        NotGeneratedError: an op or a dtype is not in the tables.
    """
    names = list(step_parameters(gm, inputs))
    head = HEAD.format(
        alignment=ALIGNMENT,
        aligned=aligned.value,
        unaligned=names[2:],
        name=NAME,
        parameters=", ".join(names),
        row=len(inputs.cells) + 1,
        numel=len(inputs.cells),
        chunk=CHUNK,
    )
    writer = Writer(inputs, aligned, block, skipping(gm))
    lines = [
        *_scalars(gm, writer),
        *([f"left = tl.where({writer.name(writer.skip)}, 0, left)  # a skipped step"] if writer.skip else []),
        *(writer.address(node) for node in inputs.cells if is_flat(node)),
        f"for start in range(0, {CHUNK}, {block}):",
        f"    offsets = start + tl.arange(0, {block})",
        f"    if start + {block} <= left:  # a whole block: no mask, so accesses can be {ALIGNMENT} bytes wide",
        *indented(_body(gm, writer, ""), 8),
        "    elif start < left:  # the last elements of the parameter",
        "        inside = offsets < left",
        *indented(_body(gm, writer, ", mask=inside"), 8),
    ]
    return head + "\n".join(indented(lines, 4)) + "\n"


def _body(gm: GraphModule, writer: "Writer", mask: str) -> list[str]:
    return [line for node in gm.graph.nodes if is_flat(node) for line in writer.lines(node, mask)]


def _scalars(gm: GraphModule, writer: "Writer") -> list[str]:
    """Return the lines by which a program of elements gets the 0-dim values that it needs."""
    prepared = prepared_nodes(gm)
    if not prepared:
        return [line for node in gm.graph.nodes if not is_flat(node) for line in writer.lines(node, "")]
    lines = [line for node in writer.shared for line in writer.lines(node, "")]
    return [*lines, f"own = scalars + {len(prepared)} * which", *map(writer.prepared, prepared, range(len(prepared)))]


class Writer:
    """Writes the lines of each node, and stores the names of the inputs."""

    def __init__(self, inputs: StepInputs, aligned: Aligned, block: int, skip: Node | None = None) -> None:
        self._inputs, self._aligned, self._block = inputs, aligned, block
        self.skip, self.shared = skip, tuple(inputs.shared)
        self._cell = {node: at for at, node in enumerate(inputs.cells)}
        self._expressions = Expressions(self.name)

    def address(self, node: Node) -> str:
        """Return the line that computes the pointer to a program's part of an input; the hint must follow the cast."""
        name = self._inputs.cells[node]
        pointer = f"tl.load(row + {self._cell[node]}).to(tl.pointer_type(tl.{_carrier(node)}))"
        wide = self._aligned is Aligned.ALL or (self._aligned is Aligned.BUT_GRADIENT and name != GRADIENT)
        hinted = f"tl.multiple_of({pointer}, {ALIGNMENT})" if wide else pointer
        return f"{name}_at = {hinted} + {f'first // {BLOCK}' if is_scales(node) else 'first'}"

    def prepared(self, node: Node, at: int) -> str:
        """Return the line that loads the value that another kernel computed, from the cell with this index."""
        kind = _stored(node)
        loaded = f"tl.load((own + {at}).to(tl.pointer_type(tl.{kind}), bitcast=True))"
        return f"{self.name(node)} = {loaded}{' != 0' if kind == 'int8' else ''}"

    def prepare(self, node: Node, at: int) -> str:
        """Return the line that stores it there."""
        kind = _stored(node)
        value = f"{self.name(node)}.to(tl.int8)" if kind == "int8" else self.name(node)
        return f"tl.store((own + {at}).to(tl.pointer_type(tl.{kind}), bitcast=True), {value})"

    def lines(self, node: Node, mask: str) -> list[str]:
        """Return the lines that compute or store the node's value; none if the kernel does not compute it."""
        if node.op == "placeholder":
            return self._load(node, mask)
        if node.op == "output":
            return []
        if node.target is aten.copy_.default:
            return self.store(node, mask) if is_flat(node) else []
        if self._is_skipped(node):
            return []
        if node.target in DECOMPOSITIONS:
            return self._coded(node, bool(mask))
        if node.target is aten.select.int:
            source, _, at = node.args
            return [f"{self.name(node)} = tl.load({self.name(source)}_at + {at})"]
        return [f"{self.name(node)} = {self._expressions.of(node)}", *self._expressions.rounding(node)]

    def _is_skipped(self, node: Node) -> bool:
        """Whether the node only selects an input's old or new value, by the flag that skips the step."""
        chooses = node.target is aten.where.self and node.args[0] is self.skip and is_flat(node)
        return chooses and all(user.target is aten.copy_.default for user in node.users)

    def _coded(self, node: Node, masked: bool) -> list[str]:
        name, args = self.name(node), node.args
        if node.target is draw_key.default:
            return key_lines(name, self.name(args[0]), self.name(args[1]))
        if node.target is block_scales.default:
            return scales_lines(name, self.name(args[0]), self._block, masked)
        if node.target is decode.default:
            return decode_lines(name, self.name(args[0]), self.name(args[1]), str(args[2]), self._block)
        if node.target is stochastic_round.default:
            return stochastic_round_lines(name, self.name(args[0]), self.name(args[1]), int(str(args[2])))
        names = [self.name(arg) for arg in args[:3]]
        return encode_lines(name, names[0], names[1], names[2], str(args[3]), int(str(args[4])), self._block)

    def _place(self, node: Node, mask: str) -> tuple[str, str]:
        """Return the pointers to the elements of a flat input that a program handles at a time, and their mask."""
        name = self.name(node)
        if not is_scales(node):
            return f"{name}_at + offsets", mask
        own = f"start // {BLOCK} + tl.arange(0, {self._block // BLOCK})"
        return f"{name}_at + {own}", f", mask=({own}) * {BLOCK} < left" if mask else ""

    def name(self, node: object) -> str:
        if not isinstance(node, Node):
            raise NotGeneratedError(f"an op reads {node!r}")
        if node in self._inputs.shared:
            return f"{self._inputs.shared[node]}_value"
        return self._inputs.cells.get(node) or f"{node.name}_"

    def _load(self, node: Node, mask: str) -> list[str]:
        name = self.name(node)
        if node in self._inputs.shared:
            return [f"{name} = tl.load({self._inputs.shared[node]})"] if node.users else []
        if is_numbers(node):
            return [f"{name}_at = tl.load(row + {self._cell[node]}).to(tl.pointer_type(tl.float64))"]
        if not is_flat(node):
            address = f"{name}_at = tl.load(row + {self._cell[node]}).to(tl.pointer_type(tl.{_carrier(node)}))"
            return [address, f"{name} = {_widened(node, f'tl.load({name}_at)')}"] if node.users else []
        if not any(user.target is not aten.copy_.default or user.args[1] is node for user in node.users):
            return []
        place, own = self._place(node, mask)
        other = ", other=0" if mask else ""
        return [f"{name} = {_widened(node, f'tl.load({place}{own}{other})')}"]

    def store(self, node: Node, mask: str) -> list[str]:
        """Return the lines of a final ``copy_`` to an input."""
        target, value = node.args[:2]
        assert isinstance(target, Node)
        if self.skip is not None and is_flat(target) and isinstance(value, Node):
            value = value.args[2]
        if target not in self._inputs.cells:
            raise NotGeneratedError(f"the step writes to {target.name}")
        name, dtype = self.name(target), value_dtype(target)
        place, own = self._place(target, mask) if is_flat(target) else (f"{name}_at", "")
        lines = [f"{name}_new = {self._expressions.operand(value, dtype)}"]
        if isinstance(value, Node) and value_dtype(value) is not dtype:
            lines += rounded(f"{name}_new", dtype)
        narrow = {
            torch.bfloat16: f"({name}_new.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)",
            torch.float16: f"{name}_new.to(tl.float16)",
            torch.bool: f"{name}_new.to(tl.int8)",
            torch.uint8: f"{name}_new.to(tl.uint8)",
            torch.int16: f"{name}_new.to(tl.int16)",
        }
        return [*lines, f"tl.store({place}, {narrow.get(dtype, f'{name}_new')}{own})"]


def _stored(node: Node) -> str:
    """Triton's type of a 0-dim value in a cell of 8 bytes."""
    kind = CARRIED[value_dtype(node)]
    return "int8" if kind == "int1" else kind


def _carrier(node: Node) -> str:
    dtype = value_dtype(node)
    return CARRIER.get(dtype) or {torch.bool: "int8", torch.uint8: "uint8", SCALES: "int16"}.get(dtype, CARRIED[dtype])


def _widened(node: Node, loaded: str) -> str:
    dtype = value_dtype(node)
    if dtype in (torch.uint8, SCALES):
        return f"{loaded}.to(tl.int32)"
    return f"({loaded} != 0)" if dtype is torch.bool else WIDEN.get(dtype, "{loaded}").format(loaded=loaded)
