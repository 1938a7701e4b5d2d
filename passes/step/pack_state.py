"""pack-state: make the step of one flat parameter read and write state that is stored in fewer bits.

1. An input that is stored as bfloat16 or float16 gets that dtype, and is converted to float32 as it is read. Values
   written to it are rounded to nearest or stochastically.
2. An input that is stored as codes becomes two inputs, ``codes`` and ``scales``, and is decoded as it is read. Writing
   to it computes the scales of its blocks, then the codes.
3. With ``compensated``, a 16-bit parameter has a compensation as another input: the step reads their sum, writes the
   result rounded to nearest, and writes the rounding error to the compensation.
4. If anything is rounded stochastically, the step derives a key for random bits from two int32 inputs: the count of
   such steps, a part of the state that the step advances, and ``stream``, the last input, which differs for each
   parameter.

Inputs are known by their role, ``node.meta[ROLE]``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from fxamp.graph import GraphWriter, first_computation
from fxamp.kernels.blockwise_8bit import BLOCK, CODES, SCALES, block_scales, decode, draw_key, encode, stochastic_round
from fxamp.passes.base import Context, Pass, Result, broken_by
from fxamp.torch_dtypes import NARROW

aten = torch.ops.aten

#: Key of ``node.meta``: the role of an input of a step's graph: "parameter", "gradient", or the name of its state.
ROLE = "fxamp_role"

#: Key of ``node.meta``: set on the inputs that this pass wrote.
STORED = "fxamp_stored"

#: The role of the state that holds the rounding errors of a parameter.
COMPENSATION = "compensation"

#: The roles of the state that counts stochastically rounded steps, and of the input ``stream`` (rule 4).
COUNT, STREAM = "rounding_steps", "stream"

_NARROW = {name: dtype for dtype, name in NARROW.items()}


@dataclass(frozen=True)
class PackState(Pass[Context]):
    """Requires a functional graph of one flat parameter, with a count for stochastic rounding; ensures rules 1 to 4.

    ``stored``: the form of each input by its role: a 16-bit dtype's name, or a code. ``stochastic``: whether bfloat16
    and codes are rounded stochastically. ``compensated``: whether the parameter has a compensation.
    """

    stored: Mapping[str, str] = field(default_factory=dict)
    stochastic: bool = False
    compensated: bool = False
    name = "pack-state"

    def run(self, gm: GraphModule, context: Context) -> Result:
        bare = self._bare(gm)
        if not bare:
            return Result(0)
        packer = _Packer(gm, GraphWriter(gm.graph, context.mode), self)
        for node in bare:
            packer.pack(node, self.stored[node.meta[ROLE]])
        gm.graph.eliminate_dead_code()
        return Result(len(bare))

    def ensures(self, gm: GraphModule, context: Context) -> str | None:
        return broken_by("not stored in their form", self._bare(gm))

    def _bare(self, gm: GraphModule) -> list[Node]:
        inputs = gm.graph.find_nodes(op="placeholder")
        return [n for n in inputs if n.meta.get(ROLE) in self.stored and STORED not in n.meta]


def is_scales(node: Node) -> bool:
    """Whether the input holds scales, one for each block of elements (rule 2)."""
    return STORED in node.meta and node.meta["val"].dtype is SCALES


class _Packer:
    """Rewrites one graph."""

    def __init__(self, gm: GraphModule, writer: GraphWriter, options: PackState) -> None:
        self._graph, self._writer, self._options = gm.graph, writer, options
        self._first = first_computation(gm.graph)
        self._slots = 0
        self._key: Node | None = None

    def pack(self, node: Node, form: str) -> None:
        """Replace one input by its stored form."""
        parts = self._inputs(node, form)
        with self._graph.inserting_before(self._first):
            value = self._read(parts, form)
            compensated = node.meta[ROLE] == "parameter" and self._options.compensated
            lost = self._compensation(_NARROW[form]) if compensated else None
            if lost is not None:
                value = self._writer.call(aten.add.Tensor, value, self._writer.in_dtype(lost, torch.float32))
        for user in list(node.users):
            if user.target is aten.copy_.default and user.args[0] is node:
                with self._graph.inserting_before(user):
                    self._write(user.args[1], parts, form, lost)
                self._graph.erase_node(user)
        node.replace_all_uses_with(value)
        self._graph.erase_node(node)

    def _inputs(self, node: Node, form: str) -> list[Node]:
        count, device = node.meta["val"].numel(), node.meta["val"].device
        kinds = [("codes", count, torch.uint8), ("scales", -(-count // BLOCK), SCALES)]
        if form in _NARROW:
            kinds = [("stored", count, _NARROW[form])]
        parts = [
            self._writer.input(f"{node.target}_{kind}", size, dtype=dtype, device=device, before=node)
            for kind, size, dtype in kinds
        ]
        for at, part in enumerate(parts):
            part.meta |= {key: value for key, value in node.meta.items() if key != "val"} | {STORED: True}
            part.meta[ROLE] = node.meta[ROLE] + ("_scales" if at else "")
        return parts

    def _read(self, parts: list[Node], form: str) -> Node:
        if form in _NARROW:
            return self._writer.in_dtype(parts[0], torch.float32)
        codes, scales = parts
        return self._writer.call(decode.default, codes, scales, form)

    def _write(self, new: object, parts: list[Node], form: str, lost: Node | None) -> None:
        assert isinstance(new, Node)
        new = self._writer.in_dtype(new, torch.float32)
        copy = aten.copy_.default
        if form in CODES:
            scales = self._writer.call(block_scales.default, new)
            key, slot = self._random_bits() if self._options.stochastic else (self._nothing(new), -1)
            self._writer.call(copy, parts[0], self._writer.call(encode.default, new, scales, key, form, slot))
            self._writer.call(copy, parts[1], scales)
            return
        if form == "bfloat16" and self._options.stochastic and lost is None:
            rounded = self._writer.call(stochastic_round.default, new, *self._random_bits())
        else:
            rounded = self._writer.in_dtype(new, _NARROW[form])
        self._writer.call(copy, parts[0], rounded)
        if lost is not None:
            rest = self._writer.call(aten.sub.Tensor, new, self._writer.in_dtype(rounded, torch.float32))
            self._writer.call(copy, lost, self._writer.in_dtype(rest, lost.meta["val"].dtype))

    def _compensation(self, dtype: torch.dtype) -> Node:
        """The input for it, which the step itself neither reads nor changes, in the dtype of the parameter."""
        inputs = self._graph.find_nodes(op="placeholder")
        bare = next(node for node in inputs if node.meta.get(ROLE) == COMPENSATION)
        value = bare.meta["val"]
        lost = self._writer.input(f"{bare.target}_stored", value.numel(), dtype=dtype, device=value.device, before=bare)
        lost.meta |= {ROLE: COMPENSATION, STORED: True}
        self._erase_copies(bare)
        self._graph.erase_node(bare)
        return lost

    def _erase_copies(self, node: Node) -> None:
        """Erase the writes of an input that the step does not change, to itself; nothing else reads it."""
        for user in list(node.users):
            assert user.target is aten.copy_.default and user.args == (node, node)
            self._graph.erase_node(user)

    def _nothing(self, new: Node) -> Node:
        return self._writer.call(aten.full.default, [], 0, dtype=torch.int32, device=new.meta["val"].device)

    def _random_bits(self) -> tuple[Node, int]:
        """Rule 4: the key, and a number that no other use of it has."""
        if self._key is None:
            self._key = self._drawn()
        self._slots += 1
        return self._key, self._slots - 1

    def _drawn(self) -> Node:
        inputs = [n for n in self._graph.find_nodes(op="placeholder") if n.meta.get(ROLE, "number") != "number"]
        count = next(node for node in inputs if node.meta[ROLE] == COUNT)
        stream = self._writer.input(STREAM, dtype=torch.int32, device=count.meta["val"].device, after=inputs[-1])
        stream.meta[ROLE] = STREAM
        self._erase_copies(count)
        with self._graph.inserting_before(self._first):
            key = self._writer.call(draw_key.default, count, stream)
            following = self._writer.call(aten.add.Tensor, count, 1)
        (output,) = self._graph.find_nodes(op="output")
        with self._graph.inserting_before(output):
            self._writer.call(aten.copy_.default, count, following)
        return key
