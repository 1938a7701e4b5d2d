"""The moment of a graph's schedule at which most memory is in use, and what is in use then.

Results, temporaries and the inputs that a forward has kept count; parameters and other inputs do not. The plan is
Inductor's own, without the values that it plans memory for but a fused kernel keeps in registers, and with its
decisions about which kernels write a result over an input that they are the last to read.
"""

import dataclasses
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from fxamp.graph import module_path
from fxamp.passes.backward.scale_backward import SCALE
from fxamp.tools.bench.cost import schedule
from fxamp.tools.bench.cost.count import Buffer, Peak
from fxamp.tools.bench.cost.schedule import Lowering, Scheduled
from fxamp.torch_private import current_metadata, overwritten_buffers
from fxamp.torch_private.parts.fx import OrderedSet
from fxamp.torch_private.parts.inductor import compute_memory_timeline, prepare_planning_info

prims = torch.ops.prims

#: A buffer of Inductor's with its sizes, and the steps of the schedule at which it is made and read last (-1: stays).
Lifetime = Any


def peak(graph: Lowering, stage: str, waiting: Sequence[Buffer]) -> Peak:
    """Return the peak of ``graph``, whose scheduler is made. ``waiting``: what other forwards keep meanwhile."""
    nodes, outputs = graph.scheduler.nodes, OrderedSet(graph.get_output_names())
    inputs = _kept_inputs(graph, outputs)
    lifetimes = _until_overwritten(graph, compute_memory_timeline(nodes, inputs, outputs)[0])
    in_use = _bytes_in_use(lifetimes, len(nodes))
    moment = max(range(len(nodes)), key=in_use.__getitem__, default=0)
    describe = _Descriptions(graph, stage)
    buffers = [*(describe.buffer(lifetime) for lifetime in _in_use(lifetimes, moment)), *waiting]
    ops, module, source = describe.kernel(nodes[moment]) if nodes else ("", "", "")
    others = sum(value.bytes for value in waiting)
    largest_first = tuple(sorted(buffers, key=lambda buffer: -buffer.bytes))
    return Peak(max(in_use) + others, stage, moment + 1, len(nodes), ops, module, source, largest_first)


def _kept_inputs(graph: Lowering, outputs: OrderedSet[str]) -> dict[str, Any]:
    """Return what the forward keeps, by name; Inductor's plan is made, with nothing for values in registers."""
    scheduler = graph.scheduler
    _, inputs = prepare_planning_info(
        scheduler.nodes,
        scheduler.name_to_buf,
        scheduler.name_to_fused_node,
        OrderedSet(graph.graph_inputs),
        outputs,
    )
    for name, buffer in inputs.items():
        # Inductor takes as many bytes as are read: more than there are, if a value is read for many elements.
        value, scalers = graph.graph_inputs[name], name == SCALE  # as torch's own is outside of its graph
        absent = scalers or value.get_device().type == "cpu"
        buffer.mpi_buffer.size_free = 0 if absent else int(value.get_numel()) * value.get_dtype().itemsize
    for node in scheduler.nodes:
        for buffer in node.get_outputs():
            if _in_registers(node, buffer) or _on_host(buffer):
                buffer.mpi_buffer.size_alloc = buffer.mpi_buffer.size_free = 0
    return inputs


def _until_overwritten(graph: Lowering, lifetimes: Sequence[Lifetime]) -> list[Lifetime]:
    """Return ``lifetimes``, where a buffer whose memory another one takes over ends as that one starts."""
    starts = {lifetime.buffer.get_name(): lifetime.start_step for lifetime in lifetimes if lifetime.size_alloc}
    taken = {old: starts[new] for new, old in overwritten_buffers(graph).items() if new in starts}
    return [
        dataclasses.replace(lifetime, end_step=taken.get(lifetime.buffer.get_name(), lifetime.end_step + 1) - 1)
        for lifetime in lifetimes
        if taken.get(lifetime.buffer.get_name()) != 0
    ]


def _in_registers(node: Scheduled, buffer: Any) -> bool:
    """Whether only the fused kernel ``node`` that makes ``buffer`` reads it: then it is never written."""
    parts = set(node.get_nodes())
    return len(parts) > 1 and bool(buffer.users) and all(user.node in parts for user in buffer.users)


def _on_host(buffer: Any) -> bool:
    """Whether ``buffer``, or each result of the call that it stands for, is in the host's memory."""
    readers: list[Any] = [getattr(user.node, "node", None) for user in buffer.users]
    results = [reader for reader in readers if type(reader).__name__ == "MultiOutput"]
    devices = [value.get_device() for value in results or [buffer.node]]
    return all(device is not None and device.type == "cpu" for device in devices)


def _bytes_in_use(lifetimes: Sequence[Lifetime], steps: int) -> list[int]:
    """Return the bytes in use at each step of the schedule, and after the last one.

    ``estimate_peak_memory`` of torch before 2.13 frees results before the first step.
    """
    changes = [0] * (steps + 2)
    for lifetime in lifetimes:
        changes[lifetime.start_step] += int(lifetime.size_alloc)
        if lifetime.end_step != -1:
            changes[lifetime.end_step + 1] -= int(lifetime.size_free)
    return list(itertools.accumulate(changes[: steps + 1]))


def _in_use(lifetimes: Sequence[Lifetime], moment: int) -> Iterator[Lifetime]:
    """Yield the buffers with memory at step ``moment`` of the schedule.

    The plan allocates the results of one call together, as the call, and frees each by itself.
    """
    starts = {lifetime.buffer.get_name(): lifetime.start_step for lifetime in lifetimes}
    for lifetime in lifetimes:
        start = lifetime.start_step
        if lifetime.size_alloc == 0 and lifetime.size_free:
            start = starts[lifetime.buffer.node.inputs[0].get_name()]
        if lifetime.size_free and start <= moment and (lifetime.end_step == -1 or moment <= lifetime.end_step):
            yield lifetime


class _Descriptions:
    """Says what one graph's buffers and kernels are and where they come from."""

    def __init__(self, graph: Lowering, stage: str) -> None:
        self._graph, self._stage = graph, stage
        self._order = {node: at for at, node in enumerate(graph.module.graph.nodes)}
        self._inputs = {node.name: node for node in graph.module.graph.find_nodes(op="placeholder")}
        metadata, names = current_metadata(), graph.get_output_names()
        results = len(names) if metadata is None or stage == "backward" else metadata.num_forward_returns
        self._results, self._kept = set(names[:results]), set(names[results:])

    def buffer(self, lifetime: Lifetime) -> Buffer:
        """Describe the buffer of ``lifetime``."""
        name = lifetime.buffer.get_name()
        if name in self._inputs:
            value, origin, kind, stage = self._graph.graph_inputs[name], self._inputs[name], "kept", "forward"
        else:
            value, origin = lifetime.buffer.node, self._origin(lifetime.buffer.node)
            kind, stage = self._kind(name), self._stage
        shape = tuple(map(int, value.get_size()))
        dtype = schedule.word(value.get_dtype())
        return Buffer(int(lifetime.size_free), dtype, shape, *_place(origin), kind, stage)

    def kernel(self, node: Scheduled) -> tuple[str, str, str]:
        """Return the kernel's ops, and the module and the line of its last op."""
        origins = [self._origin(part.node) for part in node.get_nodes()]
        ops = sorted({schedule.op(origin) for origin in origins if origin is not None})
        return ("+".join(ops), *_place(origins[-1])[1:])

    def _kind(self, name: str) -> str:
        if name in self._results:
            return "gradient" if self._stage == "backward" else "result"
        return "kept" if name in self._kept else "temporary"

    def _origin(self, value: Any) -> Node | None:
        """Return the op whose result ``value`` is: Inductor's own word, else the last op of the value's kernel."""
        origins = [node for node in getattr(value, "origins", ()) if node in self._order]
        named = value.get_origin_node() if hasattr(value, "origin_node") else None
        return named or max(origins, key=self._order.__getitem__, default=None)


def _place(origin: Node | None) -> tuple[str, str, str]:
    """Return op, module and ``file:line``; of a call's several results, the call's; of a copy, its source's."""
    if origin is None:
        return "", "", ""
    while origin.target in (operator.getitem, prims.inductor_force_stride_order.default) and origin.all_input_nodes:
        origin = origin.all_input_nodes[0]
    return schedule.op(origin), module_path(origin), schedule.source(origin)
