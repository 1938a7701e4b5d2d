"""expand-composites: decompose a composite op without a rule if ops inside it have rules.

In eager mode an op that autocast does not list, such as ``einsum``, runs as its decomposition, and autocast acts on
those ops. So a composite op without a rule is replaced by its decomposition, one level at a time, but only if an op
inside has a rule, and autocast is on there. Every other composite stays whole, for readability and for compilers, as
does a composite that occurs in its own decomposition, and a loss that chunk-losses rewrites.
"""

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node, map_arg
from torch.utils import _pytree as pytree

from fxamp.capture.autocast_state import autocast_state
from fxamp.graph import (
    argument,
    describe_source,
    dtype_of,
    fake_tensors,
    inherit_provenance,
    is_answered,
    is_composite,
    is_mutable,
    module_classes,
    module_path,
    op_name,
    register,
)
from fxamp.graph.aliases import is_view
from fxamp.graph.higher_order_ops import inner_graphs
from fxamp.passes.base import CastContext, Pass, Result
from fxamp.passes.shared.autocast_regions import AutocastRegion, outermost, walk
from fxamp.passes.shared.cast_rules import INPUT_DTYPE
from fxamp.passes.shared.linear_losses import LinearLoss, linear_loss
from fxamp.passes.shared.sites import ruling_on
from fxamp.torch_private import is_dynamic, make_fx, onednn_computes, size_oblivious
from fxamp.torch_private.parts.fx import py_sym_types, tracing

log = logging.getLogger(__name__)

#: The kernel that eager mode runs. ``OpOverload.decompose`` would prefer a Python decomposition if one is registered.
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

_LSTM = (torch.ops.aten.lstm.input, torch.ops.aten.lstm.data)

#: What a decomposition takes as inputs: sizes are computed outside of it.
_VALUES = (torch.Tensor, *py_sym_types)

_WHOLE = "%s at %s runs as one op, in the dtype of its inputs, because torch cannot trace what it computes: %s"

#: Makes the context of one attempt to trace a decomposition.
_Setting = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class ExpandComposites(Pass[CastContext]):
    """Requires values on all nodes; ensures that no composite without a rule contains an op with one."""

    name = "expand-composites"

    def run(self, gm: GraphModule, context: CastContext) -> Result:
        expander = _Expander(context)
        expander.expand(gm, outermost(context))
        return Result(expander.expanded)


class _Expander:
    def __init__(self, context: CastContext) -> None:
        self._context = context
        self._hiding: dict[Hashable, bool] = {}
        self.expanded = 0

    def expand(self, gm: GraphModule, region: AutocastRegion) -> None:
        for node, here in walk(gm, self._context, region):
            self._node(gm, node, here)
            for inner in inner_graphs(node):
                self.expand(inner, here)

    def _node(self, gm: GraphModule, node: Node, region: AutocastRegion) -> None:
        loss = linear_loss(node, self._context)
        if isinstance(loss, LinearLoss):
            return
        if isinstance(loss, str):
            level = logging.WARNING if torch.is_grad_enabled() else logging.INFO
            log.log(level, "%s at %s is not cut into chunks: %s", node.name, describe_source(node), loss)
        # Where autocast is off, no rule casts, and a decomposition may round differently from the op's own kernel.
        hides = region.lower is not None and self._hides_rule(node, region, node)
        inner = self._decomposed(node, region) if hides else None
        if inner is None:
            return
        for fresh in _inline(gm, node, inner):
            self._node(gm, fresh, region)
        self.expanded += 1

    def _hides_rule(self, node: Node, region: AutocastRegion, within: Node) -> bool:
        """Whether ``node`` is a composite without a rule, and an op in its decomposition has, or hides, a rule.

        ``within`` is the graph's node that ``node`` is or is a part of. Calls of equal signature are traced once.
        """
        device = self._context.policy.device
        if not _is_candidate(node, device) or self._ruled(node, within):
            return False
        key = self._signature(node, region, within)
        if key not in self._hiding:
            self._hiding[key] = False  # until its parts are examined: an equal call among them ends the recursion
            inner = self._decomposed(node, region)
            parts = list(inner.graph.nodes) if inner is not None else []
            ends = all(part.target is not node.target for part in parts)
            self._hiding[key] = ends and any(
                self._ruled(part, within) or self._hides_rule(part, region, within) for part in parts
            )
        return self._hiding[key]

    def _ruled(self, node: Node, within: Node) -> bool:
        """Whether a rule applies to the call, whose module is that of ``within``."""
        if not isinstance(node.target, OpOverload):
            return False
        return ruling_on(node, self._context.policy, within=within).rule is not None

    def _signature(self, node: Node, region: AutocastRegion, within: Node) -> Hashable:
        """Return what decides whether a composite is expanded: its decomposition, and its module if rules need it."""
        if not self._context.policy.conditional:
            return _signature(node), region.captured
        shapes = tuple(
            str(tuple(value.shape)) for source in node.all_input_nodes for value in fake_tensors(source.meta.get("val"))
        )
        return _signature(node), region.captured, shapes, module_path(within), module_classes(within)

    def _decomposed(self, node: Node, region: AutocastRegion) -> GraphModule | None:
        """Return one level of the op's decomposition; None, with a warning, if it cannot be traced on values alone."""
        arguments = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        leaves, spec = pytree.tree_flatten(arguments)
        values = [leaf for leaf in leaves if isinstance(leaf, _VALUES)]

        def call(*given: Any) -> Any:
            rest = iter(given)
            filled = [next(rest) if isinstance(leaf, _VALUES) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(filled, spec)
            with torch._C.DisableTorchFunction():  # a function mode would call the composite op itself again
                return node.target._op_dk(_COMPOSITE, *args, **kwargs)  # type: ignore[union-attr]

        inner, trouble = None, ""
        for kernels, sizes in product(self._kernels(node, region), self._sizes(leaves)):
            try:
                with tracing(None), self._autocast(region), kernels(), sizes(), torch.no_grad():
                    inner = make_fx(call, tracing_mode="fake", pre_dispatch=True)(*values)
                break
            except RuntimeError as error:
                trouble = (str(error) or type(error).__name__).splitlines()[0]
        if inner is None:
            log.warning(_WHOLE, op_name(node), describe_source(node), trouble)
            return None
        for part in reversed(inner.graph.nodes):
            if is_answered(part) and not part.users:
                inner.graph.erase_node(part)
        return inner

    def _kernels(self, node: Node, region: AutocastRegion) -> Iterator[_Setting]:
        """Yield the settings of oneDNN to try: its LSTM kernel takes no symbolic sizes, cells do.

        ``nn.LSTM`` is also decomposed to cells where the kernel must not run, or lacks the region's dtype on this CPU.
        """
        if node.target not in _LSTM:
            yield nullcontext
            return
        if self._context.lstm_kernel and (region.lower is None or onednn_computes(region.lower)):
            yield nullcontext
        yield partial(torch.backends.mkldnn.flags, enabled=False)

    def _sizes(self, arguments: Sequence[Any]) -> Iterator[_Setting]:
        """Yield the answers to try to questions about sizes, which fail for sizes that depend on values."""
        yield nullcontext
        if any(map(is_dynamic, arguments)):
            yield partial(size_oblivious, self._context.mode.shape_env)

    def _autocast(self, region: AutocastRegion) -> AbstractContextManager[None]:
        """Set the autocast state that the program was captured under, because it may be valid only in that state."""
        if region.captured is None:
            return nullcontext()
        return autocast_state(self._context.policy.device, True, region.captured)


def _is_candidate(node: Node, device: str) -> bool:
    composite = node.op == "call_function" and is_composite(node.target, device)
    return composite and not is_view(node) and not is_mutable(node)


def _signature(node: Node) -> Hashable:
    """Return the facts that a decomposition depends on, as far as policies see them, such as ranks and dtypes."""

    def describe(value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            return value.dim(), value.dtype, value.device.type
        return type(value).__name__ if isinstance(value, (torch.SymInt, torch.SymFloat)) else repr(value)

    arguments = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return node.target, tuple(describe(leaf) for leaf in pytree.tree_leaves(arguments))


def _inline(gm: GraphModule, node: Node, inner: GraphModule) -> list[Node]:
    """Replace ``node`` by the nodes of ``inner``; return them."""
    inputs = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if _is_value(leaf)]
    env: dict[Node, Any] = dict(zip(inner.graph.find_nodes(op="placeholder"), inputs, strict=True))
    fresh: list[Node] = []
    with gm.graph.inserting_before(node):
        for old in inner.graph.nodes:
            if old.op == "placeholder":
                continue
            if old.op == "output":
                result = map_arg(old.args[0], lambda n: env[n])
                break
            if old.op == "get_attr":
                old.target = register(gm, "_constant", getattr(inner, str(old.target)))
            env[old] = copy = gm.graph.node_copy(old, lambda n: env[n])
            inherit_provenance(copy, node)
            if _is_told_its_inputs_dtype(old):
                copy.meta[INPUT_DTYPE] = True
            fresh.append(copy)
    if isinstance(result, Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(result[user.args[1]])
            gm.graph.erase_node(user)
    gm.graph.erase_node(node)
    return fresh


def _is_told_its_inputs_dtype(node: Node) -> bool:
    """Whether the call's ``dtype`` is that of its input, as ``log_softmax`` has it in a cross-entropy."""
    if not isinstance(node.target, OpOverload) or not node.args:
        return False
    dtype = dtype_of(node.args[0])
    return dtype is not None and argument(node, "dtype") == dtype


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, Node) and isinstance(leaf.meta.get("val"), _VALUES)
