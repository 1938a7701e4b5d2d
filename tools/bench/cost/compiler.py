"""A substitute for Inductor's inner compiler: it lowers and schedules a graph, counts it, and runs nothing."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxamp.graph import module_path
from fxamp.tools.bench.cost import schedule
from fxamp.tools.bench.cost.count import Buffer, Count
from fxamp.tools.bench.cost.peak import peak
from fxamp.torch_private import current_metadata
from fxamp.torch_private.parts.functorch import config as functorch_config
from fxamp.torch_private.parts.fx import TracingContext
from fxamp.torch_private.parts.inductor import GraphLowering, compile_fx


@dataclass
class Counted:
    """The counts so far.

    ``texts``: the generated modules by stage, if requested. ``waiting``: what each forward saves whose backward has not
    run, which counts in the peak.
    """

    wants_text: bool = False
    count: Count = field(default_factory=Count)
    texts: list[tuple[str, str]] = field(default_factory=list)
    waiting: list[list[Buffer]] = field(default_factory=list)


class _Scheduled(Exception):
    """The graph is scheduled and counted; nothing is to be compiled."""


@contextlib.contextmanager
def counting(counted: Counted) -> Iterator[None]:
    """Inside, graphs that Inductor would compile are counted instead, and return empty results of the right shapes.

    AOTAutograd's cache is off: there is nothing to store.
    """
    whole, inner = compile_fx.compile_fx, _counting_inner(counted, compile_fx.compile_fx_inner)

    def outer(*args: Any, inner_compile: Any = inner, **options: Any) -> Any:
        return whole(*args, **{**options, "inner_compile": inner_compile})

    with (
        patch.object(compile_fx, "compile_fx_inner", inner),
        patch.object(compile_fx, "compile_fx", outer),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


def _counting_inner(counted: Counted, real: Callable[..., Any]) -> Callable[..., Any]:
    def inner(gm: GraphModule, examples: Sequence[Any], **kwargs: Any) -> Any:
        stage = "backward" if kwargs.get("is_backward") else "forward"
        results = _results(gm)
        if stage == "backward":
            returned = sum(value.nbytes for value in results if isinstance(value, Tensor))
            counted.count.gradients = max(counted.count.gradients, returned)
        if stage == "forward":
            counted.count.graphs += 1
            values = _kept(gm)
            counted.count.kept += values

        def scheduled(self: GraphLowering) -> Any:
            _count(self, stage, counted)
            raise _Scheduled

        with patch.object(GraphLowering, "_compile_to_module", scheduled):
            try:
                real(gm, examples, **kwargs)
            except Exception as error:
                if not _caused_by_counting(error):
                    raise
        if stage == "forward":
            counted.waiting.append(values)
        return _empty(results)

    return inner


def _caused_by_counting(error: BaseException | None) -> bool:
    """Inductor wraps what is raised while it compiles."""
    while error is not None:
        if isinstance(error, _Scheduled) or isinstance(getattr(error, "inner_exception", None), _Scheduled):
            return True
        error = error.__cause__ or error.__context__
    return False


def _count(graph: GraphLowering, stage: str, counted: Counted) -> None:
    graph._update_scheduler()
    if stage == "backward" and counted.waiting:
        counted.waiting.pop()  # the backward's own peak has it
    highest = peak(graph, stage, [value for values in counted.waiting for value in values])
    counted.count.peak = max(counted.count.peak, highest, key=lambda peak: peak.bytes)
    counted.count.kernels += schedule.kernels(graph, stage)
    for dtype, number in schedule.flops(cast(GraphModule, graph.module)).items():
        for totals in (counted.count.flops, *([counted.count.forward_flops] if stage == "forward" else [])):
            totals[dtype] = totals.get(dtype, 0) + number
    context = TracingContext.try_get()
    if stage == "forward" and context is not None and context.output_strides is not None:
        context.output_strides.extend(map(_strides, graph.graph_outputs or ()))
    if counted.wants_text:
        code, _ = graph.codegen()
        counted.texts.append((stage, code.value))


def _strides(result: Any) -> tuple[int, ...] | None:
    """The strides that Inductor gives a result; None for a result that is not a tensor, as in Inductor."""
    if not hasattr(result, "get_stride"):
        return None
    try:
        return tuple(int(stride) for stride in result.get_stride())
    except NotImplementedError:
        return None


def _results(gm: GraphModule) -> list[Any]:
    (output,) = gm.graph.find_nodes(op="output")
    return [value.meta.get("val") if isinstance(value, Node) else value for value in output.args[0]]


def _empty(results: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
    """A compiled graph that computes nothing: empty tensors for tensors, anything else as it was traced."""

    def run(args: list[Any]) -> list[Any]:
        args.clear()
        return [_like(value) if isinstance(value, Tensor) else value for value in results]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _like(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _kept(gm: GraphModule) -> list[Buffer]:
    """Distinct storages of the GPU that the forward returns beyond its results, largest first."""
    metadata = current_metadata()
    if metadata is None:
        return []
    (output,) = gm.graph.find_nodes(op="output")
    storages: dict[int, Buffer] = {}
    for node in output.args[0][metadata.num_forward_returns :]:
        value = node.meta.get("val") if isinstance(node, Node) and node.op != "placeholder" else None
        if isinstance(value, Tensor) and value.device.type != "cpu":
            dtype, storage = schedule.word(value.dtype), value.untyped_storage()
            where = module_path(node), schedule.source(node)
            storages[storage._cdata] = Buffer(storage.nbytes(), dtype, tuple(value.shape), schedule.op(node), *where)
    return sorted(storages.values(), key=lambda value: -value.bytes)
