"""Trace a graph of torch functions (Dynamo's) to the pre-dispatch ATen graph, node by node.

torch.autocast acts at this level: composite ops such as ``aten.linear`` are not decomposed yet. Every new node carries
the user's stack trace, module path and a value. fxamp leaves verbatim what it must not trace through: higher-order ops,
because a naive retrace drops custom gradients, and anything that fails to trace.
"""

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node, Proxy
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from fxamp.capture.autocast_setters import with_regions
from fxamp.capture.autocast_state import AUTOCAST, autocast_state, autocast_states, in_autocast_states
from fxamp.capture.conversions import conversion
from fxamp.capture.distinct_results import tracing_mode
from fxamp.capture.fakes import fake_like
from fxamp.capture.hidden_gradients import GradientNodes, without_hooks
from fxamp.capture.module_fakes import ModuleFakes
from fxamp.capture.objects import is_object
from fxamp.capture.reads import Reads
from fxamp.capture.recorded_values import is_recorded, recorded_value
from fxamp.capture.region_calls import inline_regions
from fxamp.capture.regions import IN_TRANSFORM, VERBATIM, Regions, is_mark
from fxamp.capture.size_inputs import by_input, join_sizes
from fxamp.errors import CaptureError
from fxamp.graph import fake_mode_of, first_computation, follows_input, inherit_provenance, is_answered, register
from fxamp.graph.higher_order_ops import OPAQUE, gradient_hook
from fxamp.torch_private import drop_guards_on_ragged_sizes, make_fx, real_object, rebind_sizes, size_tables
from fxamp.torch_private.parts.fx import disable_proxy_modes_tracing, py_sym_types, tracing, track_tensor_tree

_PLACEHOLDER_ATTRIBUTES = ("_dynamo_source", "_dynamo_param_name")

#: Keys of a placeholder's ``meta`` that its copy lacks: values of another trace, and Dynamo's weak reference to the
#: input, with which torch.utils.swap_tensors would refuse a parameter. Dynamo drops its own after compiling.
_NOT_ADOPTED = ("example_value", "val", "grapharg")


def trace_aten(gm: GraphModule, fakes: Sequence[Any], mode: FakeTensorMode) -> GraphModule:
    """Trace ``gm`` for inputs ``fakes``, all of ``mode``; placeholders keep their order, names and metadata.

    Bodies of higher-order ops are not traced. Returns a new module; in ``gm`` at most the order of the nodes changes.
    """
    _move_placeholders_ahead(gm.graph)
    leaves, structure = pytree.tree_flatten(list(fakes))
    trace = make_fx(
        lambda *args: _AtenTrace(with_regions(inline_regions(gm)), mode).run(
            *pytree.tree_unflatten(args, structure), enable_io_processing=False
        ),
        tracing_mode="fake",
        pre_dispatch=True,
        allow_non_fake_inputs=True,
    )
    with _preserved_global_state(), tracing(None), fx_traceback.preserve_node_meta(), mode:
        traced = trace(*leaves)
    drop_guards_on_ragged_sizes(mode.shape_env)
    _erase_unread(traced.graph)
    join_sizes(traced.graph, fakes)
    _adopt_placeholders(gm, traced, fakes)
    traced.meta.update(gm.meta)
    return traced


def _move_placeholders_ahead(graph: Graph) -> None:
    """Move placeholders ahead of all calls: Dynamo 2.11 puts a size that a selective checkpoint reads after it."""
    first = first_computation(graph)
    late = [node for node in graph.find_nodes(op="placeholder", sort=True) if first < node]
    for node in late:
        first.prepend(node)


class _AtenTrace(Interpreter):
    """Runs a torch-level graph under make_fx, which records the ATen ops that it executes."""

    def __init__(self, gm: GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(gm, garbage_collect_values=False)  # an assertion reads what others have read before
        self._mode = mode
        self._tracing = tracing_mode()
        self._tracer: Any = self._tracing.tracer
        self._fakes = ModuleFakes(mode, self._tracing)
        self._regions = Regions(self._tracer.graph)
        self._reads = Reads()
        self._objects: dict[Node, Node] = {}
        self._asserted: dict[Node, Node] = {}

    def run(self, *args: Any, **options: Any) -> Any:
        """Run the graph; raise CaptureError if a recorded op reads a different value than the program's call."""
        placeholders = self.graph.find_nodes(op="placeholder")
        made = by_input(self._tracer.graph.find_nodes(op="placeholder"), args)
        for given, nodes in zip(placeholders, made, strict=True):
            self._reads.record(given, nodes)
        results = super().run(*args, **options)
        self._reads.require_own()
        for node in reversed(self._objects.values()):
            if not node.users:
                self._tracer.graph.erase_node(node)
        return results

    def run_node(self, n: Node) -> Any:
        if n.op == "placeholder":
            return super().run_node(n)
        for source in n.all_input_nodes:
            entry = self._entry(self.env[source])
            if entry is not None:
                self._reads.require(entry.proxy.node, source)
        last, inputs = self._last, self._inputs(n)
        value = self._value(n)
        returned = {id(leaf) for leaf in pytree.tree_leaves(value)}
        holds_input = n in self._objects or any(id(tensor) in returned for tensor in inputs)
        self._reads.record(n, self._after(last), holds_input)
        return value

    def _entry(self, value: Any) -> Any:
        return self._tracing.node_of(value) if isinstance(value, torch.Tensor) else None

    def _after(self, last: Node | None) -> Iterator[Node]:
        return itertools.takewhile(lambda node: node is not last, reversed(self._tracer.graph.nodes))

    def _value(self, n: Node) -> Any:
        if n.op in ("get_attr", "output"):
            return super().run_node(n)
        if n.op == "call_module":
            return self._module(n)
        if n.target is torch.ops.aten._assert_tensor_metadata.default:
            return None  # torch.export asserts dtypes, which the policy changes
        if n.target is torch.ops.aten._assert_scalar.default and isinstance(n.args[0], Node):
            return self._assert(n, n.args[0])
        if is_mark(n):
            return self._regions.mark(n, tuple(self.fetch_args_kwargs_from_env(n)[0]))
        if self._regions.inside_transform(n):
            return self._keep(n, IN_TRANSFORM)
        if gradient_hook(n) is not None:
            return self._hook(n)
        if isinstance(n.target, HigherOrderOperator):
            return self._keep(n, "higher-order")
        if n.target is torch.autograd.grad:
            return self._keep(n, "autograd differentiates the rewritten graph")
        if follows_input(n):
            return self._follow(n)
        return self._trace(n)

    def _trace(self, n: Node) -> Any:
        try:
            with self._undone_on_failure(n):
                return self._traced(n)
        except Exception as error:
            try:
                with self._forced_autocast(n), self._undone_on_failure(n):
                    return self._traced(n)
            except Exception:
                if not is_recorded(n):
                    raise CaptureError(f"{n.name} = {n.target} cannot be traced: {error}") from error
                return self._keep(n, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")

    def _traced(self, n: Node) -> Any:
        """Trace ``n``. A call with an effect but without an op is left verbatim, because the trace lacks the effect.

        Raises CaptureError if the result is a tensor that no op of the trace returns, or has a different gradient than
        its ops.
        """
        last, tensors = self._last, self._inputs(n)
        versions = _versions(tensors)
        # An op is recorded whole, and so is its gradient.
        nodes = None if isinstance(n.target, OpOverload | OpOverloadPacket) else GradientNodes(tensors)
        with without_hooks():
            result = super().run_node(n)
        if nodes is not None:
            nodes.require_derived(result)
        no_op = self._last is last and n.op in ("call_function", "call_method")
        if no_op and is_object(result):
            self._objects[n] = self._copy(n)
            return result
        if no_op and (result is None or versions != _versions(tensors)):
            self._record(n, None, "it is not an op, and may change state that no value shows")
            return result
        leaves = pytree.tree_leaves(result)
        if any(isinstance(leaf, torch.Tensor) and self._tracing.node_of(leaf) is None for leaf in leaves):
            raise CaptureError("it returns a tensor that no op computes")
        rebind_sizes(n, result)
        return result

    def _inputs(self, n: Node) -> list[torch.Tensor]:
        """Return the tensors that ``n`` reads; those of an object, such as a dataclass, are what its call got."""
        tensors = []
        for source in n.all_input_nodes:
            if source in self._objects:
                tensors += self._inputs(source)
            else:
                tensors += [leaf for leaf in pytree.tree_leaves(self.env[source]) if isinstance(leaf, torch.Tensor)]
        return tensors

    @property
    def _last(self) -> Node | None:
        return next(iter(reversed(self._tracer.graph.nodes)), None)

    @contextmanager
    def _undone_on_failure(self, n: Node) -> Iterator[None]:
        """If tracing ``n`` fails inside this context, remove its nodes and restore the nodes of its inputs.

        Nodes that compute a number from earlier nodes alone stay, because the tracer has recorded them for later uses.
        """
        graph, last = self._tracer.graph, self._last
        sizes = [(table, len(table)) for table in size_tables(self._tracer)]
        known = [(tensor, self._tracing.node_of(tensor)) for tensor in self._inputs(n)]
        try:
            yield
            self._require_known(last)
        except Exception:
            _erase_after(last, graph)
            for table, length in sizes:
                while len(table) > length:
                    table.popitem()
            for tensor, node in known:
                self._tracing.restore(tensor, node)
            raise

    def _require_known(self, last: Node | None) -> None:
        """Raise CaptureError if a node after ``last`` reads a tensor inside a wrapper, which the graph lacks."""
        for node in self._after(last):
            held = getattr(self._tracer.root, str(node.target), None) if node.op == "get_attr" else None
            if isinstance(held, torch.Tensor) and fake_mode_of(held) is not None:
                raise CaptureError("it reads tensors inside a tensor subclass, which are not in the graph")

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = self.fetch_attr(target)
        return self._fakes.fake(target, value) if isinstance(value, torch.Tensor) else value

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        converted = conversion(target, args, kwargs)
        return super().call_method(target, args, kwargs) if converted is None else converted

    def _module(self, n: Node) -> Any:
        module = self.fetch_attr(str(n.target))
        with self._fakes.replacing(str(n.target), module):
            return self._trace(n)

    def _forced_autocast(self, n: Node) -> AbstractContextManager[None]:
        """Set autocast for the device of the node's inputs: the policy's casts may make an invalid call valid."""
        tensors = [self.env[source] for source in n.all_input_nodes if isinstance(self.env[source], torch.Tensor)]
        return autocast_state(tensors[0].device.type if tensors else "cpu", True)

    def _follow(self, n: Node) -> Any:
        """Record ``.data``, or a DTensor's creation, unwrapping or redistribution, verbatim; its value is computed."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        args, kwargs = pytree.tree_map(real_object, (args, kwargs))
        with disable_proxy_modes_tracing():
            value = getattr(self, n.op)(n.target, args, kwargs)
        return self._record(n, value)

    def _hook(self, n: Node) -> Any:
        """Record a hook on a tensor's gradient; its result is that tensor, which later calls read as before."""
        tensor = self.env[n.args[0]]  # type: ignore[index]
        node = self._copy(n)
        node.meta.update({AUTOCAST: autocast_states(), VERBATIM: "higher-order", "val": tensor})
        return tensor

    def _assert(self, n: Node, condition: Node) -> None:
        """Record the assertion of a size that Dynamo takes for a constant: only a run shows whether the size is right.

        Tracing would assert the constant itself, as AOTAutograd does; under AOTAutograd such an assertion cannot fail.
        """
        if isinstance(self.env[condition], torch.SymBool):
            self._trace(n)
            return
        self._copy(n, self._number).meta.update({AUTOCAST: autocast_states(), "val": None})

    def _number(self, n: Node) -> Any:
        """Record the call that computes a number from tensors, although the number is known while tracing."""
        if n.op == "placeholder" or isinstance(self.env[n], torch.Tensor):
            return self._graph_value(n)
        if n not in self._asserted:
            self._asserted[n] = self._copy(n, self._number)
            self._asserted[n].meta.update({AUTOCAST: autocast_states(), "val": self.env[n]})
        return self._asserted[n]

    def _keep(self, n: Node, reason: str) -> Any:
        """Record the node verbatim, with the value that Dynamo or torch.export recorded.

        If the program changes the shape or strides of the value in place, as ``t_`` does, Dynamo's value has the final
        ones. The value is then computed again, except for calls that only run inside a torch.func transform.
        """
        value = recorded_value(n)
        with disable_proxy_modes_tracing():
            if reason != IN_TRANSFORM and _is_reshaped(n):
                value = self._before_reshaping(n, value)
            value = pytree.tree_map_only(torch.Tensor, _result, fake_like(value, self._mode))
        return self._record(n, value, reason)

    def _before_reshaping(self, n: Node, end: Any) -> Any:
        """Return the value of ``n`` before the program changes its shape or strides; ``end`` is the value after it.

        The dtypes are those of ``end``, because this runs without autocast.
        """
        leaves, structure = pytree.tree_flatten(getattr(self, n.op)(n.target, *self.fetch_args_kwargs_from_env(n)))
        ends = pytree.tree_leaves(end)
        pairs = zip(leaves, ends, strict=True)
        both = [now.to(own.dtype) if isinstance(now, torch.Tensor) else now for now, own in pairs]
        return pytree.tree_unflatten(both, structure)

    def _copy(self, n: Node, argument: Callable[[Node], Any] | None = None) -> Node:
        """Copy ``n`` into the new graph; ``argument`` returns the copy's argument for an input of ``n``."""
        args, kwargs = map_arg((n.args, n.kwargs), argument or self._graph_value)
        node: Node = self._tracer.graph.create_node(n.op, n.target, tuple(args), dict(kwargs), n.name)
        inherit_provenance(node, n)
        return node

    def _record(self, n: Node, value: Any, reason: str = "") -> Any:
        tracer, node = self._tracer, self._copy(n)
        node.meta[AUTOCAST] = autocast_states()
        if reason:
            node.meta[VERBATIM] = reason
        if reason == IN_TRANSFORM:
            node.meta[OPAQUE] = True
        node.meta["val"] = value
        with disable_proxy_modes_tracing():  # it copies values; a DTensor's inner values have no node yet
            track_tensor_tree(value, Proxy(node, tracer), constant=None, tracer=tracer)
        return value

    def _graph_value(self, source: Node) -> Any:
        """Return the fx argument for the value of ``source``; for an object that a call computes, the call's node."""
        own = self._objects.get(source)
        return pytree.tree_map(self._graph_argument, self.env[source]) if own is None else own

    def _graph_argument(self, value: Any) -> Any:
        """Return the fx argument for a run-time value: its node, or a ``get_attr`` of what the module then holds."""
        tracer = self._tracer
        if isinstance(value, torch.nn.Module):
            return tracer.graph.get_attr(register(tracer.root, "body", value))
        if isinstance(value, torch.Tensor) and self._tracing.node_of(value) is None:
            value = self._fakes.fake("_tensor_constant", value)
        unwrapped = tracer.unwrap_proxy(value)
        if isinstance(unwrapped, Proxy):
            return unwrapped.node
        if not is_object(unwrapped):
            return unwrapped
        held = tracer.graph.get_attr(register(tracer.root, "object", unwrapped))
        held.meta["val"] = unwrapped  # a body that has the object as an input is traced with it
        return held


#: Methods that change the shape or the strides of a tensor in place.
_RESHAPING = frozenset(
    ("as_strided_", "resize_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_")
)


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    with torch._C.DisableTorchFunction():
        return [tensor._version for tensor in tensors]


def _is_reshaped(n: Node) -> bool:
    """Whether the program changes the shape or strides of a result of ``n`` in place."""
    results = {n} | {user for user in n.users if user.target is operator.getitem}
    return any(user.op == "call_method" and user.target in _RESHAPING for own in results for user in own.users)


def _result(value: torch.Tensor) -> torch.Tensor:
    """Return a copy that is the result of a computation if needed: in-place ops reject leaves that need a gradient."""
    if not value.requires_grad or not value.is_leaf or not torch.is_grad_enabled():
        return value
    return value.clone()


def _erase_unread(graph: Graph) -> None:
    """Remove unread tensors of the module, and unread calls whose answer the trace has used.

    Examples of such calls are ``.item()`` of a constant, and the question whether cuDNN accepts a tensor.
    """
    for node in reversed(graph.nodes):
        if not node.users and (node.op == "get_attr" or is_answered(node)):
            graph.erase_node(node)


def _erase_after(last: Node | None, graph: Graph) -> None:
    """Erase the nodes after ``last``, except those that compute a number from nodes that stay."""
    erased: set[Node] = set()
    node = next(iter(graph.nodes)) if last is None else last.next
    while node.op != "root":
        number = isinstance(node.meta.get("val"), py_sym_types)
        if not number or not erased.isdisjoint(node.all_input_nodes):
            erased.add(node)
        node = node.next
    for node in reversed(graph.nodes):
        if node in erased:
            graph.erase_node(node)


def _adopt_placeholders(gm: GraphModule, traced: GraphModule, fakes: Sequence[Any]) -> None:
    """Copy the old placeholders' metadata to the new ones: compilers read sources and static inputs there."""
    old = gm.graph.find_nodes(op="placeholder")
    new = traced.graph.find_nodes(op="placeholder")
    for source, target, fake in zip(old, new, fakes, strict=True):
        target.meta.update({key: value for key, value in source.meta.items() if key not in _NOT_ADOPTED})
        target.meta["val"] = fake
        target._rename(source.name)
        target.target = target.name
        for attribute in _PLACEHOLDER_ATTRIBUTES:
            if hasattr(source, attribute):
                setattr(target, attribute, getattr(source, attribute))
    for source, target, fake in reversed(list(zip(old, new, fakes, strict=True))):
        if isinstance(fake, torch.Tensor) or source.args != (fake,):
            break
        target.args = source.args  # the default, with which it was traced
    traced.recompile()


@contextmanager
def _preserved_global_state() -> Iterator[None]:
    """Restore grad mode and every device's autocast state on exit, whatever the traced program sets."""
    with torch.set_grad_enabled(torch.is_grad_enabled()), in_autocast_states(autocast_states()):
        yield
