"""Estimate by counting whether a graph's products gain from bfloat16 on a CPU.

A CPU with units for bfloat16 multiplies it two to three times as fast as float32, but converts what enters and leaves a
product, and takes longer to prepare each call. The two numbers below are fitted to training steps of GPT-2 blocks, MLPs
and ResNet stages of several widths, each compiled in both dtypes, on one thread of an AMD EPYC with avx512_bf16 under
torch 2.13 (tools/bench/README.md). They are conservative: a CPU with faster units gains earlier.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from fxamp.graph import all_nodes, fake_tensors
from fxamp.passes.base import Context
from fxamp.passes.shared.decision import decision
from fxamp.policy import CastRule, Category
from fxamp.reports.record import CastGraph
from fxamp.torch_private import hint

#: FLOPs that pay for converting one element of a product's operands or result.
FLOPS_PER_ELEMENT = 40

#: FLOPs that pay for one call.
FLOPS_PER_CALL = 8_000_000

#: The number that stands for a size that depends on values, as in Inductor.
_UNKNOWN = 8192


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return _known(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


#: The CPU's attention, which torch's counter does not know.
_ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}


@dataclass(frozen=True)
class Products:
    """The products of a graph that a policy runs in 16 bits.

    ``calls``: their number. ``flops``: the FLOPs of all of them, where a multiplication and an addition are two.
    ``elements``: the number of elements of their floating-point operands and results. ``dynamic``: whether sizes may
    change after compilation.
    """

    calls: int = 0
    flops: int = 0
    elements: int = 0
    dynamic: bool = False

    @property
    def cost(self) -> int:
        """The FLOPs that conversions and calls cost."""
        return FLOPS_PER_ELEMENT * self.elements + FLOPS_PER_CALL * self.calls

    @property
    def pay(self) -> bool:
        """Whether bfloat16 saves more than it costs."""
        return self.flops > self.cost

    def __str__(self) -> str:
        if not self.calls:
            return "the graph has no products"
        dynamic = " for the first sizes" if self.dynamic else ""
        return f"{_mega(self.flops)} MFLOP in {self.calls} products{dynamic} (bfloat16 pays from {_mega(self.cost)})"


def products(graph: CastGraph) -> Products:
    """Count the products of ``graph``, its bodies included.

    Dynamic sizes count with their values at compile time, without a guard: the graph keeps its policy when they change.
    """
    calls = [_product(node, graph.context) for node in all_nodes(graph.captured.module) if _in_16_bits(node)]
    counted = [call for call in calls if call.flops]
    return Products(
        len(counted),
        sum(call.flops for call in counted),
        sum(call.elements for call in counted),
        any(call.dynamic for call in counted),
    )


def _in_16_bits(node: Node) -> bool:
    decided = decision(node)
    rule = None if decided is None else decided.rule
    return isinstance(rule, CastRule) and rule.cast is Category.LOWER_PRECISION_FP


def _product(node: Node, context: Context) -> Products:
    """Count one call; the result has no FLOPs if the call is not a product."""
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda value: value.meta["val"])
    with context.computing(), FlopCounterMode(display=False, custom_mapping=_ATTENTION) as counter:
        node.target(*args, **kwargs)  # type: ignore[operator]
    tensors = fake_tensors((args, kwargs, node.meta["val"]))
    sizes = [tensor.numel() for tensor in tensors if tensor.is_floating_point()]
    dynamic = any(isinstance(size, torch.SymInt) for size in sizes)
    return Products(1, _known(counter.get_total_flops()), sum(map(_known, sizes)), dynamic)


def _known(number: Any) -> int:
    known = hint(number)
    return _UNKNOWN if known is None else known


def _mega(flops: int) -> str:
    return f"{flops / 1e6:.3g}"
