"""Pack a floating-point value into fewer bits, and unpack it: the nodes to insert in the forward and the backward.

8 bits: the elements are divided by the scale of their block, and stored as integers or floats. The scale is the block's
largest finite magnitude divided by the form's largest value, rounded to bfloat16, which has float32's range. Codes
beyond that value represent inf and NaN, so a mask of -inf or an overflow is restored exactly. Finite values stay
finite. In 8-bit floats, values other than zero have at least the smallest subnormal's magnitude, which keeps their
signs. All computations are in float32, with ops that Inductor can lower after the partition.

Three things let Inductor fuse packing with the op that computes the value, and unpacking with the ops that read it.
Blocks lie along the last dimension of the nodes that reduce them, and codes are contiguous in that order. An unpacked
value may have a different memory layout than the original, as Inductor itself changes the layout of saved tensors.
Unpacking takes few ops, because Inductor writes a value with several readers to memory if it takes many ops.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import inf, nan, prod

import torch
from torch import Tensor
from torch.fx import Node

from fxamp.graph import INSERTED, GraphWriter, dense_order, is_wrapper
from fxamp.kernels import host_memory as host_memory  # registers the ops
from fxamp.passes.shared import float8_bits
from fxamp.policy import KeepRule
from fxamp.policy.model.keep_rule import EIGHT_BITS, Keep
from fxamp.torch_devices import converts_float8
from fxamp.torch_dtypes import NARROW
from fxamp.torch_private import hint

#: Key of the ``meta`` of a backward's inputs that hold a packed value.
PACKED = "fxamp_packed"

aten, fxamp_ops = torch.ops.aten, torch.ops.fxamp


@dataclass(frozen=True)
class _Codes:
    """The codes of an 8-bit form: of the largest finite value, of infinity, of its negative, and of NaN.

    The last three decode by ``(code + shift) * inf``.
    """

    dtype: torch.dtype
    largest: float
    infinity: float
    negative: float
    nan: float
    shift: float = 0.0


#: Conversions to float8 may saturate, so infinity has a code of its own there too: the dtype's largest number.
_CODES = {
    Keep.INT8: _Codes(torch.int8, 126.0, 127.0, -128.0, -127.0, shift=127.0),
    Keep.FLOAT8_E4M3FN: _Codes(torch.float8_e4m3fn, 416.0, 448.0, -448.0, nan),
    Keep.FLOAT8_E5M2: _Codes(torch.float8_e5m2, 49152.0, 57344.0, -57344.0, nan),
}

_NARROW_FORMS = {Keep.BFLOAT16: torch.bfloat16, Keep.FLOAT16: torch.float16}

#: Device types with memory of their own, from which values can go to the host.
_SENDERS = frozenset({"cuda"})

#: The minimum bytes of a copy to the host: fewer are not worth the calls. At 50 GB/s this takes 20 microseconds.
LEAST_SENT = 1 << 20

#: The minimum scale, so that a block of zeros has a nonzero one.
_LEAST = 1e-30

#: Smaller blocks would spend too much memory on scales.
_SMALLEST_BLOCK = 32


@dataclass(frozen=True)
class Packing:
    """How one value is packed.

    ``dtype``: the value's dtype. ``memory``: the permutation of the dimensions in which the value is contiguous;
    ``order``: the permutation in which its codes are contiguous. The last dimensions in ``order``, of sizes
    ``trailing``, are flattened and split into blocks of ``block`` elements. If ``trailing`` is empty, ``block`` is 0,
    and each row, of unknown length, is a block. ``by_bits``: codes are computed by integer arithmetic and stored as
    uint8, where a compiler cannot convert to their dtype. ``device``: the device of a value that goes to the host.
    """

    form: Keep
    dtype: torch.dtype
    block: int = 0
    memory: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    trailing: tuple[int, ...] = ()
    by_bits: bool = False
    device: torch.device | None = None

    @property
    def parts(self) -> int:
        """Return the number of tensors that hold the packed value."""
        return 2 if self.form in EIGHT_BITS else 1

    @property
    def has_signs(self) -> bool:
        """Whether the codes alone show which values are positive, negative, zero or NaN.

        8-bit integers have no NaN, and round small values to zero.
        """
        return self.form in EIGHT_BITS and _CODES[self.form].dtype.is_floating_point

    @property
    def words(self) -> str:
        """Return the form with the block size: ``"int8/128"``."""
        return f"{self.form}/{self.block or 'row'}" if self.form in EIGHT_BITS else str(self.form)


def plan_packing(value: Tensor, rule: KeepRule, place: str = "") -> Packing | str:
    """Return how ``rule`` packs ``value``, or why it cannot or would save nothing.

    ``place``: the type of the device that the value will be on, if not its own.
    """
    plan = _plan(value, rule, place or value.device.type)
    if isinstance(plan, str) or rule.keep is not Keep.FLOAT8_E4M3FN or converts_float8(value.device):
        return plan
    return replace(plan, by_bits=True)


def _plan(value: Tensor, rule: KeepRule, place: str) -> Packing | str:
    if is_wrapper(value) or value.layout is not torch.strided:
        return "it is not a plain dense tensor"
    if rule.keep is Keep.HOST:
        return _sent(value, rule, place)
    if value.dtype not in (*NARROW, torch.float32):
        return f"it is {str(value.dtype).removeprefix('torch.')}"
    if rule.keep in _NARROW_FORMS:
        return "it has 16 bits already" if value.dtype in NARROW else Packing(rule.keep, value.dtype)
    if not value.shape or 0 in [size for size in value.shape if isinstance(size, int)]:
        return "it has no row of elements"
    order = dense_order(value)
    if order is None:
        return "its elements do not fill its memory"
    axis, block = _axis(value, order[-1], rule.block)
    if block >= min(_SMALLEST_BLOCK, rule.block):
        last = (*(dim for dim in order if dim != axis), axis)
        return Packing(rule.keep, value.dtype, block, order, last, (int(value.shape[axis]),))
    if isinstance(value.shape[order[-1]], int):
        return _joined(value, rule.keep, order, rule.block)
    return Packing(rule.keep, value.dtype)


def _sent(value: Tensor, rule: KeepRule, place: str) -> Packing | str:
    if place not in _SENDERS:
        return "it is in the host's memory already" if place == "cpu" else f"{place} has no copies to the host here"
    if dense_order(value) is None:
        return "its elements do not fill its memory"
    elements = hint(value.numel())
    if not rule.elements and (elements is None or elements * value.element_size() < LEAST_SENT):
        return f"it has fewer than {LEAST_SENT} bytes, and the rule has no elements"
    return Packing(Keep.HOST, value.dtype, device=value.device)


def _axis(value: Tensor, innermost: int, most: int) -> tuple[int, int]:
    """Return the dimension to split into blocks, and the size of the largest blocks that fit.

    This is the innermost dimension. For images (4 dimensions or more) it is the channels, which compilers for GPUs make
    innermost, unless their blocks would be much smaller. Blocks do not cross rows: small elements would lose precision
    in a block with the much larger ones of another row, and a norm magnifies that error.
    """
    dims = {1, innermost} if value.dim() > 3 else {innermost}
    blocks = {dim: _divisor(value.shape[dim], most) for dim in dims}
    axis = max(dims, key=lambda dim: (blocks[dim].bit_length(), dim != innermost))
    return axis, blocks[axis]


def _joined(value: Tensor, form: Keep, order: tuple[int, ...], most: int) -> Packing | str:
    """Return the packing of a value with short rows: split joined rows into blocks, or make each row a block."""
    sizes = [value.shape[dim] for dim in reversed(order)]
    known = [size for size in takewhile(lambda size: isinstance(size, int), sizes) if isinstance(size, int)]
    for count in range(2, len(known) + 1):
        block = _divisor(prod(known[:count]), most)
        if block >= min(_SMALLEST_BLOCK, most):
            trailing = tuple(reversed(known[:count]))
            return Packing(form, value.dtype, block, order, order, trailing)
    row = int(value.shape[order[-1]])
    if row * value.element_size() <= row + 2:
        return f"its rows of {row} are too short for scales"
    return Packing(form, value.dtype, row, order, order, (row,))


def _divisor(size: int | torch.SymInt, most: int) -> int:
    """Return the largest divisor of ``size`` up to ``most``; 0 if ``size`` is unknown."""
    if not isinstance(size, int):
        return 0
    return next(part for part in range(min(most, size), 0, -1) if size % part == 0)


def _most(codes: _Codes, dtype: torch.dtype) -> float:
    """Return the largest bfloat16 scale whose products with codes are finite in ``dtype``."""
    exact = torch.tensor(torch.finfo(dtype).max / codes.largest, dtype=torch.float64, device="cpu")
    mantissa, exponent = torch.frexp(exact)
    return float(torch.ldexp(torch.floor(mantissa * 2**8), exponent - 8))


class PackWriter:
    """Inserts nodes into one graph through ``writer``."""

    def __init__(self, writer: GraphWriter) -> None:
        self._call, self._as = writer.call, writer.in_dtype

    def pack(self, node: Node, packing: Packing, why: str) -> list[Node]:
        """Insert nodes that pack ``node``; return its codes and scales, or its narrower form."""
        if packing.form in _NARROW_FORMS:
            narrow = self._as(node, _NARROW_FORMS[packing.form])
            return [self._described(narrow, node, why)]
        if packing.form is Keep.HOST:
            host = self._call(fxamp_ops.send_to_host.default, node, [])
            self._call(fxamp_ops.await_copies.default, [host], packing.device, [node])
            return [self._described(self._call(aten.unsqueeze.default, host, 0), node, why)]
        codes = _CODES[packing.form]
        wide = self._as(self._in_blocks(node, packing), torch.float32)
        magnitude = self._call(aten.abs.default, wide)
        finite = self._call(aten.lt.Scalar, magnitude, inf)
        top = self._call(aten.amax.default, self._where(finite, magnitude, 0.0), [-1], True)
        top = self._call(aten.maximum.default, top, self._number(_LEAST, top))
        scale = self._as(self._call(aten.div.Tensor, top, codes.largest), torch.bfloat16)
        scale = self._call(aten.minimum.default, scale, self._number(_most(codes, packing.dtype), scale))
        scaled = self._scaled(wide, magnitude, self._as(scale, torch.float32), codes)
        nonfinite = self._where(self._call(aten.gt.Scalar, wide, 0.0), codes.infinity, codes.negative, like=wide)
        nonfinite = self._where(self._call(aten.ne.Tensor, wide, wide), codes.nan, nonfinite)
        coded = self._where(finite, scaled, nonfinite)
        coded = float8_bits.encode(self._call, coded) if packing.by_bits else self._as(coded, codes.dtype)
        if packing.order != packing.memory:
            coded = self._contiguous(coded)
        return [self._described(part, node, why) for part in (coded, scale)]

    def _scaled(self, wide: Node, magnitude: Node, scale: Node, codes: _Codes) -> Node:
        """Divide ``wide``, of this ``magnitude``, by ``scale``, within what ``codes`` represent: floats keep its sign.

        Integers round small values to zero: rounded up to the next integer, they would be too large on average.
        """
        if not codes.dtype.is_floating_point:
            scaled = self._call(aten.round.default, self._call(aten.div.Tensor, wide, scale))
            return self._clamp(scaled, -codes.largest, codes.largest)
        limits = torch.finfo(codes.dtype)
        scaled = self._call(aten.div.Tensor, magnitude, scale)
        scaled = self._clamp(scaled, limits.smallest_normal * limits.eps, codes.largest)
        return self._call(aten.mul.Tensor, scaled, self._call(aten.sign.default, wide))  # zero stays zero

    def unpack(self, parts: Sequence[Node], packing: Packing, strides: bool = True) -> Node:
        """Insert nodes that restore the value from ``parts``; ``strides``: also restore the original's strides."""
        if packing.form in _NARROW_FORMS:
            return self._as(parts[0], packing.dtype)
        if packing.form is Keep.HOST:
            value = self._call(fxamp_ops.take_from_host.default, parts[0], packing.device, [], near=parts[0])
            self._call(fxamp_ops.await_copies.default, [value], packing.device, [parts[0]])
            return value
        codes = _CODES[packing.form]
        coded, scale = self._decoded(parts[0], packing), self._as(parts[1], torch.float32)
        nonfinite = self._call(aten.add.Tensor, coded, codes.shift) if codes.shift else coded
        nonfinite = self._call(aten.mul.Tensor, nonfinite, inf)
        beyond = self._call(aten.gt.Scalar, self._call(aten.abs.default, coded), codes.largest)
        value = self._where(beyond, nonfinite, self._call(aten.mul.Tensor, coded, scale))
        return self._laid_out(self._as(value, packing.dtype), packing, strides)

    def unpack_signs(self, codes: Node, packing: Packing, strides: bool = True) -> Node:
        """Insert nodes that turn ``codes`` into a float32 value with the signs, zeros and NaN of the packed value.

        Only for the forms for which :attr:`Packing.has_signs` holds.
        """
        return self._laid_out(self._decoded(codes, packing), packing, strides)

    def _decoded(self, codes: Node, packing: Packing) -> Node:
        return float8_bits.decode(self._call, codes) if packing.by_bits else self._as(codes, torch.float32)

    def _laid_out(self, value: Node, packing: Packing, strides: bool) -> Node:
        """Put the elements of ``value``, which are in blocks, in the shape and order that they had before packing."""
        if not packing.order:
            return value
        lead = self._sizes(value)[: len(packing.order) - len(packing.trailing)]
        value = self._call(aten.reshape.default, value, [*lead, *packing.trailing])
        now = packing.order
        if strides and now != packing.memory:
            value = self._contiguous(self._permuted(value, [now.index(dim) for dim in packing.memory]))
            now = packing.memory
        return self._permuted(value, [now.index(dim) for dim in range(len(now))])

    def _in_blocks(self, node: Node, packing: Packing) -> Node:
        if not packing.order:
            return node
        node = self._permuted(node, packing.order)
        lead = self._sizes(node)[: len(packing.order) - len(packing.trailing)]
        blocks = prod(packing.trailing) // packing.block
        # Not a view: kernels may return different strides than AOTAutograd has foreseen.
        return self._call(aten.reshape.default, node, [*lead, blocks, packing.block])

    def _permuted(self, node: Node, order: Sequence[int]) -> Node:
        return node if list(order) == sorted(order) else self._call(aten.permute.default, node, list(order))

    def _contiguous(self, node: Node) -> Node:
        return self._call(aten.clone.default, node, memory_format=torch.contiguous_format)

    def _sizes(self, node: Node) -> list[int | Node]:
        """Return the sizes of ``node``; symbolic sizes as nodes."""
        sizes = enumerate(node.meta["val"].shape)
        return [size if isinstance(size, int) else self._call(aten.sym_size.int, node, dim) for dim, size in sizes]

    def _clamp(self, node: Node, least: float, most: float) -> Node:
        node = self._call(aten.maximum.default, node, self._number(least, node))
        return self._call(aten.minimum.default, node, self._number(most, node))

    def _where(self, condition: Node, yes: Node | float, no: Node | float, like: Node | None = None) -> Node:
        near = next((operand for operand in (yes, no, like) if isinstance(operand, Node)), condition)
        both = (operand if isinstance(operand, Node) else self._number(operand, near) for operand in (yes, no))
        return self._call(aten.where.self, condition, *both)

    def _number(self, number: float, like: Node) -> Node:
        """Return a 0-dim tensor: ``where`` and ``maximum`` do not take plain numbers."""
        value = like.meta["val"]
        return self._call(aten.full.default, [], number, dtype=value.dtype, device=value.device)

    def _described(self, part: Node, of: Node, why: str) -> Node:
        part.meta.update({key: of.meta[key] for key in ("stack_trace", "nn_module_stack", "custom") if key in of.meta})
        part.meta[INSERTED] = why
        return part
