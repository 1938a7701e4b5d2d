"""Inductor: how it treats an op and the outputs of a graph, and two changes to it."""

from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

from torch._ops import OpOverload
from torch.fx import Node


def calls_kernel(target: object) -> bool:
    """Whether Inductor calls the kernel of the op ``target``, instead of writing code for it. Imports Inductor.

    Inductor then passes inputs in the layouts that it chose for them. Breaks loudly.
    """
    from torch._inductor.lowering import fallbacks, lowerings

    return isinstance(target, OpOverload) and (target in fallbacks or target not in lowerings)


def drop_outputs(output: Node, places: Collection[int]) -> None:
    """Tell Inductor that the outputs at ``places`` of the node ``output`` became None, if it recorded their layouts.

    If torch renames the note, Inductor raises for graphs on GPUs.
    """
    key = "user_visible_output_idxs"
    if key in output.meta:
        output.meta[key] = [at for at in output.meta[key] if at not in places]


def realize_inputs_of(op: OpOverload) -> None:
    """From now on Inductor writes each input of ``op``, whose kernel it calls, once. Imports Inductor. Breaks loudly.

    Otherwise it would compute an input once for each call that reads it, so that two calls read two equal copies.
    """
    from torch._inductor.lowering import needs_realized_inputs

    needs_realized_inputs.add(op)


def compiled_function(arguments: Sequence[str], source: str) -> Callable[..., None]:
    """Compile C++ for the CPU, by Inductor's compiler and into its cache. Imports Inductor. Breaks loudly.

    ``source`` defines ``extern "C" void kernel(...)``; ``arguments``: its types, pointers for tensors and ``int64_t``.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    function: Callable[..., None] = CppPythonBindingsCodeCache.load_pybinding(arguments, source)
    return function


def order_writes() -> None:
    """Make Inductor keep reads of a buffer after the writes to it, from now on. Imports Inductor. Breaks loudly.

    When its C++ backend recomputes a node's loops to fuse it, it loses the fact that the node reads the result of a
    scatter, and may move the node before the scatter, so that gradients become zero. Before torch 2.13 it also loses
    that the node writes to what others must read first.
    """
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch._inductor.scheduler import SchedulerNode
    from torch.utils._ordered_set import OrderedSet

    recompute = SchedulerNode.recompute_size_and_body
    if recompute.__module__ == __name__:
        return

    def recompute_and_rename(node: SchedulerNode, *args: Any, **kwargs: Any) -> None:
        order: Any = OrderedSet(dep for dep in node.read_writes.reads if isinstance(dep, (WeakDep, StarDep)))
        recompute(node, *args, **kwargs)
        node.set_read_writes(node.read_writes.with_read(order).rename(node.mutation_renames))

    SchedulerNode.recompute_size_and_body = recompute_and_rename  # type: ignore[method-assign, assignment]


def overwritten_buffers(graph: Any) -> dict[str, str]:
    """Return, by the name of a buffer of ``graph``, the one whose memory its kernel writes it to. Breaks loudly.

    ``graph``: a GraphLowering whose scheduler is made, while Inductor compiles it. Each kernel decides as in code
    generation, which is still possible for the graph.
    """
    from torch._inductor.virtualized import V

    if graph.wrapper_code is None:
        graph.init_wrapper_code()
    scheduler, result = graph.scheduler, dict[str, str]()
    completed = scheduler.completed_operations
    kernel = SimpleNamespace(args=SimpleNamespace(make_inplace=lambda old, new: None), inplace_update_buffers=result)
    scheduler.completed_operations = type(completed)(completed)
    try:
        with V.set_kernel_handler(kernel):
            for node in scheduler.nodes:
                for part in node.get_nodes():
                    part.decide_inplace_update()
                scheduler.completed_operations.update(node.get_operation_names())
    finally:
        scheduler.completed_operations = completed
    return result
