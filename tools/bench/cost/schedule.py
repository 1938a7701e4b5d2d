"""Kernels, bytes and FLOPs of one graph, from Inductor's schedule of it: each operand of a kernel is moved once."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry, register_flop_formula

from fxamp.graph import source_frames
from fxamp.tools.bench.cost.count import HOST_COPY, Access, Kernel

#: GraphLowering and scheduler nodes of Inductor; torch gives them no stable types.
Lowering = Any
Scheduled = Any

_MATMUL = re.compile(r"\b(mm|addmm|bmm|baddbmm|_scaled_mm|_grouped_mm|scaled_grouped_mm)\b")


def _grouped_flops(left: torch.Size, right: torch.Size, *args: object, **kwargs: object) -> int:
    """FLOPs of all groups together: they share the rows, the columns, or what is summed over."""
    return 2 * prod(left) * right[-1] if len(right) == 3 or len(left) == 2 else 2 * prod(left[-2:]) * right[-1]


if torch.ops.aten._grouped_mm not in flop_registry:
    register_flop_formula(torch.ops.aten._grouped_mm)(_grouped_flops)


def kernels(graph: Lowering, stage: str) -> list[Kernel]:
    """The kernels of ``graph``, whose scheduler is made, and not yet emptied by code generation."""
    return [_kernel(graph, node, stage) for node in graph.scheduler.nodes if _is_kernel(node)]


def flops(gm: GraphModule) -> dict[str, int]:
    """FLOPs of the products of a lowered graph, by the dtype of their first operand."""
    result: dict[str, int] = defaultdict(int)
    for node in gm.graph.nodes:
        packet = getattr(node.target, "overloadpacket", None)
        if node.op != "call_function" or packet not in flop_registry or "val" not in node.meta:
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
        first = next(leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor))
        packed = 2 if first.dtype is torch.float4_e2m1fn_x2 else 1  # values in an element
        result[word(first.dtype)] += packed * int(flop_registry[packet](*args, **kwargs, out_val=node.meta["val"]))
    return dict(result)


#: Ops that launch nothing; the kernels of the steps in a backward are counted by hand.
_NO_KERNELS = ("fxamp.hand_over.default", "fxamp.await_copies.default")

#: Copies between a GPU and the host, and the side of each that is in the GPU's memory.
_HOST_COPIES = {"fxamp.send_to_host.default": "reads", "fxamp.take_from_host.default": "writes"}


def _is_kernel(node: Scheduled) -> bool:
    if type(node).__name__ == "NopKernelSchedulerNode" or _overload(node) in _NO_KERNELS:
        return False
    return not (_is_library(node) and type(node.node).__name__ == "MultiOutput")


def _is_library(node: Scheduled) -> bool:
    return type(node).__name__.startswith("ExternKernel")


def _kernel(graph: Lowering, node: Scheduled, stage: str) -> Kernel:
    sides = []
    for reads in (True, False):
        accesses = node.get_read_write_buffer_accesses(include_reads=reads, include_writes=not reads)
        moved = dict(accesses) if _is_library(node) else _moved(graph, node, accesses, "reads" if reads else "writes")
        if _kind(node) == HOST_COPY:
            moved = _on_gpu(graph, node) if (_HOST_COPIES[_overload(node)] == "reads") is reads else {}
        sides.append(tuple(Access(name, int(size), _dtype(graph, name)) for name, size in moved.items()))
    origins = list(_origins(node))
    ops = _overload(node) if _is_library(node) else "+".join(sorted({op(origin) for origin in origins}))
    return Kernel(stage, _kind(node), ops, sides[0], sides[1], tuple(sorted({*filter(None, map(source, origins))})))


def _kind(node: Scheduled) -> str:
    if not _is_library(node):
        return "triton"
    overload = _overload(node)
    if overload in _HOST_COPIES:
        return HOST_COPY
    if "attention" in overload:
        return "attention"
    if "convolution" in overload:
        return "convolution"
    if _MATMUL.search(overload.replace("_kernels", "")):
        return "matmul"
    return "fxamp" if "fxamp" in overload else "library"


def _on_gpu(graph: Lowering, node: Scheduled) -> dict[str, int]:
    """The value that a copy reads or writes, and its bytes; what it only waits for is not moved."""
    value = node.node.inputs[0]
    return {value.get_name(): int(value.get_numel()) * value.get_dtype().itemsize}


def _overload(node: Scheduled) -> str:
    inner = node.node
    named = getattr(inner, "op_overload", None) or getattr(inner, "python_kernel_name", None)
    return str(named or node.get_name())


def _origins(node: Scheduled) -> Iterator[Node]:
    for part in node.get_nodes():
        yield from filter(None, getattr(part.node, "origins", ()))


def op(origin: Node) -> str:
    """The ATen op that a node was made of, in short."""
    name = str(origin.meta.get("original_aten") or origin.target)
    return name.replace("aten.", "").replace(".default", "").replace("prims.", "")


def source(node: Node) -> str:
    """``file:line`` of the innermost frame that a node comes from; ``""`` if unknown."""
    frames = source_frames(node)
    return f"{frames[-1].file}:{frames[-1].line}" if frames else ""


def _moved(graph: Lowering, node: Scheduled, accesses: Mapping[str, int], side: str) -> dict[str, int]:
    """Inductor's bytes per buffer, but for a gather or scatter no more than the elements that it asks for.

    Inductor counts all of the buffer there wherever the kernel is fused. What the kernel has made itself is in
    registers when it is read, or was counted when it was written.
    """
    parts = list(node.get_nodes())
    if side == "reads":
        own = {name for part in parts for name in part.get_buffer_names()}
        accesses = {name: size for name, size in accesses.items() if name not in own}
    if not all(hasattr(part, "get_ranges") for part in parts):
        return dict(accesses)
    asked: dict[str, dict[str, int]] = defaultdict(dict)
    for part in parts:
        elements = prod(int(size) for sizes in part.get_ranges() for size in sizes)
        for dependency in getattr(part.read_writes, side):
            if dependency.name in accesses:
                index, count = _asked(graph, dependency, elements)
                asked[dependency.name][index] = count * graph.get_dtype(dependency.name).itemsize
    return {name: min(size, sum(asked[name].values())) if asked[name] else size for name, size in accesses.items()}


def _asked(graph: Lowering, dependency: Any, elements: int) -> tuple[str, int]:
    """The index of a read or write, as text, and how many elements of the buffer it touches."""
    if type(dependency).__name__ != "MemoryDep":
        return "", int(graph.get_numel(dependency.name))
    index = str(dependency.index)
    return index, elements if dependency.is_indirect() else int(dependency.get_numel())


def _dtype(graph: Lowering, name: str) -> str:
    """The dtype of a buffer; ``""`` for several results at once, and for names that stand for no buffer."""
    try:
        return word(graph.get_dtype(name))
    except (KeyError, NotImplementedError):
        return ""


def word(dtype: torch.dtype) -> str:
    """The dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")
