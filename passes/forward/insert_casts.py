"""insert-casts: insert every cast that the decisions ask for.

1. A node's inputs get the dtypes of its rule (:mod:`~fxamp.passes.shared.cast_rules`), or those that the op's autocast
   kernel gives them, position by position, unless it would write to one of these casts; without either it follows its
   inputs.
2. Uses of a value in one dtype share a cast if that changes no gradient beyond what autocast's own weight cache does:
   for values that need no gradient, and for float32 leaves that need one (:mod:`~fxamp.passes.shared.cast_writer`
   decides it). Other values are cast once per use, and twice for an op that reads one twice, so that their gradients
   are summed in float32. AOTAutograd merges such casts in the forward. ``torch.library.register_autocast`` has no
   cache, and neither has ``torch.autocast(cache_enabled=False)``.
3. No cast is shared across a write to the value's memory, or between grad modes.
4. If an op rejects its new dtypes, its inputs are cast back to the captured ones; if it rejects that of memory that it
   writes to, it writes to a cast, which is copied back. The inputs of an op that reads bits (``x.view(torch.int32)``),
   and of every node that fxamp does not understand, are cast back too; if such a node may have written to a cast, the
   cast is copied back to its source. In flex_attention only the query, key and value follow the policy; the bodies read
   what they were captured with.
5. Bodies of checkpoints, conds, custom autograd.Functions and hooks are rewritten for the new dtypes of their inputs. A
   hook stays on its tensor, in that tensor's new dtype, and never moves to a cast, because it must see the gradient of
   all uses. The same holds for the gradient that ``torch.autograd.grad`` computes in a graph.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node, map_arg
from torch.utils import _pytree as pytree

from fxamp.capture import VERBATIM
from fxamp.capture.fakes import fake_like
from fxamp.errors import CaptureError
from fxamp.graph import (
    AliasSets,
    GraphWriter,
    argument,
    computed,
    describe_source,
    floating_inputs,
    follows_input,
    graph_output,
    op_name,
    recompute,
    returned,
    set_argument,
    tensor_value,
    writes,
)
from fxamp.graph.higher_order_ops import AutogradFunction, Body, autograd_function, bodies, gradient_hook
from fxamp.graph.opaque_writes import written_inputs
from fxamp.passes.base import CastContext, Pass, Result
from fxamp.passes.shared.accepted_dtypes import cast_back, lacks_kernel, reads_bits, rejection
from fxamp.passes.shared.cast_rules import Edit, edit_for
from fxamp.passes.shared.cast_writer import AutogradInfo, CastWriter
from fxamp.passes.shared.custom_autocast import before_custom_cast
from fxamp.passes.shared.decision import WAS, decision, overrule
from fxamp.passes.shared.registered_autocast import REGISTERED_ID


@dataclass(frozen=True)
class InsertCasts(Pass[CastContext]):
    """Requires a decision on every op (annotate-rules); ensures that all values have the dtypes their inputs imply."""

    name = "insert-casts"

    def requires(self, gm: GraphModule, context: CastContext) -> str | None:
        missing = [n for n in gm.graph.nodes if isinstance(n.target, OpOverload) and decision(n) is None]
        return f"node {missing[0].name} has no decision: run annotate-rules first" if missing else None

    def run(self, gm: GraphModule, context: CastContext) -> Result:
        grad = torch.is_grad_enabled()
        with context.computing():
            counts = _Rewriter(gm, context, grad, per_region=context.only_regions is not None).rewrite()
        return Result(counts["inserted"] + counts["cast back"], counts)


class _Rewriter:
    """Visits the nodes of one graph in order; ``captured`` holds the values that its nodes had before."""

    def __init__(
        self,
        gm: GraphModule,
        context: CastContext,
        grad: bool,
        outer: Sequence[AutogradInfo] | None = None,
        per_region: bool = False,
    ) -> None:
        self._gm = gm
        self._context = context
        self._captured = {node: before_custom_cast(node).meta.get("val") for node in gm.graph.nodes}
        self._casts = CastWriter(gm.graph, grad, outer, per_region)
        self._writer = GraphWriter(gm.graph, context.mode)
        self._counts = {"inserted": 0, "shared": 0, "cast back": 0}

    def rewrite(self) -> dict[str, int]:
        for node in list(self._gm.graph.nodes):
            self._casts.visit(node)
            if node.op in ("call_function", "call_method", "call_module"):
                self._node(node)
        self._casts.erase_unused()
        self._note_changes()
        self._counts["inserted"] += self._casts.inserted
        self._counts["shared"] += self._casts.shared
        return self._counts

    def _note_changes(self) -> None:
        for node, before in self._captured.items():
            if self._changed(node):
                node.meta.setdefault(WAS, tuple(_dtypes(before)))

    def _node(self, node: Node) -> None:
        if bodies(node):
            return self._higher_order(node)
        function = autograd_function(node)
        if function is not None:
            return self._function(node, function)
        hook = gradient_hook(node)
        if hook is not None:
            return self._hook(node, hook)
        if node.target is operator.getitem:
            node.meta["val"] = computed(node)
            return None
        if follows_input(node):
            return self._follow(node)
        if node.target is torch.autograd.grad:
            return self._gradient(node)
        if node.target is torch.ops.higher_order.flex_attention:
            return self._attention(node)
        if not isinstance(node.target, OpOverload):
            return self._opaque(node)
        if node.target.overloadpacket is torch.ops.aten.set_:
            self._require_one_memory(node)
        if reads_bits(node) and self._changed(node.all_input_nodes[0]) and _written_later(node):
            raise self._shared_cast(node, "a clone() of it before the write, if it is to have memory of its own,")
        return self._op(node)

    def _require_one_memory(self, node: Node) -> None:
        """Raise CaptureError where ``set_`` would share the memory of a cast instead of that of its source."""
        if len(set(_dtypes([source.meta.get("val") for source in node.all_input_nodes]))) > 1:
            raise self._shared_cast(node, "tensors that both have this dtype under the policy,")

    def _shared_cast(self, node: Node, accepted: str) -> CaptureError:
        """Return the error for a node that would share the memory of a cast instead of that of its source."""
        source = next(source for source in reversed(node.all_input_nodes) if self._changed(source))
        now = ", ".join(str(dtype).removeprefix("torch.") for dtype in _dtypes(source.meta.get("val")))
        return CaptureError(
            f"{op_name(node)} at {describe_source(node)} shares memory with {source.name}, which is {now} "
            f"under the policy {self._context.policy.name}; accepted: {accepted} or torch._dynamo.graph_break() before "
            "it"
        )

    def _follow(self, node: Node) -> None:
        """Let ``.data``, or a DTensor layout call, use its input's new dtype."""
        if any(self._changed(source) for source in node.all_input_nodes):
            node.meta["val"] = computed(node)

    def _gradient(self, node: Node) -> None:
        """Differentiate with respect to the values themselves, not their casts, which the outputs may not depend on."""
        inputs = pytree.tree_leaves(node.args[1] if len(node.args) > 1 else node.kwargs["inputs"])
        dtypes = {source: dtype for source, dtype in cast_back(node, self._captured).items() if source not in inputs}
        self._casts.cast_uses(node, dtypes, "autograd differentiates it as captured")
        pairs = zip(node.meta["val"], inputs, strict=True)
        node.meta["val"] = tuple(None if value is None else value.to(of.meta["val"].dtype) for value, of in pairs)

    def _opaque(self, node: Node) -> None:
        if not cast_back(node, self._captured):
            return
        casts = self._restore_inputs(node, "fxamp does not look into it")
        written = set(written_inputs(node))  # its inputs are casts now
        for source, cast in ((source, cast) for source, cast in casts.items() if cast in written):
            why = f"for {node.name}: what it wrote to the cast belongs in {source.name}"
            with node.graph.inserting_after(node):
                self._writer.call(torch.ops.aten.copy_.default, source, cast, why=why)

    def _attention(self, node: Node) -> None:
        """Let flex_attention compute in the dtype of query, key and value; its bodies keep what else they read."""
        operands = node.args[:3]
        dtypes = set(_dtypes([operand.meta["val"] for operand in operands if isinstance(operand, Node)]))
        if len(dtypes) > 1:
            return self._opaque(node)
        others = {source: dtype for source, dtype in cast_back(node, self._captured).items() if source not in operands}
        self._casts.cast_uses(node, others, "its bodies are as captured")
        node.meta[VERBATIM] = "in the dtype of query, key and value; its bodies as captured"
        result, *sums = node.meta["val"]
        node.meta["val"] = (result.to(dtypes.pop()), *sums)
        return None

    def _op(self, node: Node) -> None:
        choice = decision(node)
        call = (node.args, node.kwargs, node.target)
        edit, kernel = Edit(), None if choice is None or choice.kernel is None else dict(choice.kernel)
        if kernel is not None and self._would_lose_writes(node, kernel):
            overrule(node, "its autocast kernel would let it write to casts")
            kernel = choice = None
        if kernel is not None:
            self._cast_as_kernel(node, kernel)
        elif choice is not None and choice.rule is not None and choice.lower is not None:
            edit = edit_for(choice.rule, node, choice.lower, self._context)
            self._apply(node, edit, f"rule {choice.rule.id}", choice.cached)
        touched = bool(edit.casts or edit.kwargs) or any(self._changed(source) for source in node.all_input_nodes)
        if not touched and self._returns_captured(node):
            return
        refused = rejection(node, self._captured) if kernel is None else None  # a kernel may mix dtypes
        why = refused or recompute(node)
        if why is None:
            return
        node.args, node.kwargs, node.target = call
        self._restore_inputs(node, why)
        if recompute(node) is not None:  # only its inputs' dtypes can be the reason
            node.args, node.kwargs, node.target = call
            if any(map(self._changed, writes(node))):
                self._write_to_casts(node, why)
            else:
                node.meta["val"] = computed(node) if touched else self._captured[node]

    def _would_lose_writes(self, node: Node, dtypes: Mapping[str, torch.dtype]) -> bool:
        """Whether the op's autocast kernel casts memory that the op writes to: in eager mode, the write is lost."""
        written = writes(node)
        return any(
            source in written and self._is_cast_to(source, dtype)
            for name, dtype in dtypes.items()
            for source in pytree.tree_leaves(argument(node, name))
        )

    def _cast_as_kernel(self, node: Node, dtypes: Mapping[str, torch.dtype]) -> None:
        """Cast each argument to the dtype that the op's autocast kernel gives it, without a cache (rule 2)."""

        def cast(source: Node, dtype: torch.dtype) -> Node:
            if not self._is_cast_to(source, dtype):
                return source
            return self._casts.cast(source, dtype, node, f"rule {REGISTERED_ID}", cached=False)

        for name, dtype in dtypes.items():
            set_argument(node, name, map_arg(argument(node, name), partial(cast, dtype=dtype)))

    def _is_cast_to(self, source: Node, dtype: torch.dtype) -> bool:
        """Whether an autocast kernel that casts eligible inputs to ``dtype`` changes the dtype of ``source``."""
        value = tensor_value(source)
        return value is not None and self._context.eligible(value) and value.dtype != dtype

    def _write_to_casts(self, node: Node, why: str) -> None:
        """Let an op that refuses the dtype of what it writes to compute in the captured dtypes, and copy that back."""
        written, values = writes(node), {source: self._captured.get(source) for source in floating_inputs(node)}
        dtypes = {s: v.dtype for s, v in values.items() if self._changed(s) and isinstance(v, torch.Tensor)}
        self._counts["cast back"] += len(dtypes)
        casts = self._casts.cast_uses(node, dtypes, why, cached=False)
        node.meta["val"] = computed(node)
        for source in [source for source in written if source in casts]:
            with node.graph.inserting_after(node):
                self._writer.call(torch.ops.aten.copy_.default, source, casts[source], why=f"for {node.name}")
            if tensor_value(node) is not None:  # its result is what it wrote to
                node.replace_all_uses_with(source)

    def _returns_captured(self, node: Node) -> bool:
        """Whether a call that reads what it read when captured returns what it returned.

        Under an ambient autocast the captured value is autocast's result, for inputs that the op itself may refuse.
        """
        if lacks_kernel(node, written=False):
            return False
        if writes(node):
            return True
        return self._context.captured_autocast is None or (recompute(node) is None and not self._changed(node))

    def _apply(self, node: Node, edit: Edit, why: str, cached: bool) -> None:
        self._casts.cast_uses(node, edit.casts, why, cached)
        if edit.target is not None:
            _call_instead(node, edit.target)
        for name, value in edit.kwargs.items():
            set_argument(node, name, value)

    def _restore_inputs(self, node: Node, why: str) -> dict[Node, Node]:
        """Cast inputs back to their captured dtypes; return the casts by source."""
        overrule(node, why)
        dtypes = cast_back(node, self._captured)
        self._counts["cast back"] += len(dtypes)
        return self._casts.cast_uses(node, dtypes, why)

    def _changed(self, source: Node) -> bool:
        before, now = self._captured.get(source), source.meta.get("val")
        return before is not now and _dtypes(before) != _dtypes(now)

    def _higher_order(self, node: Node) -> None:
        inner = bodies(node)
        results = [self._body(body.module, body.operands) for body in inner]
        differing = {i for row in results for i, pair in enumerate(zip(results[0], row, strict=True)) if _differ(*pair)}
        if differing:
            for body in inner:
                _cast_results(body.module, {i: node.meta["val"][i].dtype for i in differing})
        node.meta["val"] = type(node.meta["val"])(_results(inner[0].module))

    def _function(self, node: Node, function: AutogradFunction) -> None:
        """Rewrite the forward for its operands' new dtypes, the backward for those of gradients and saved values."""
        self._body(function.forward.module, function.forward.operands)
        outputs, saved = returned(function.forward.module.graph)
        values = pytree.tree_map(lambda n: n.meta["val"] if isinstance(n, Node) else n, outputs)
        incoming = [*pytree.tree_leaves(outputs), *saved]
        self._body(function.backward.module, incoming)
        operands = [tensor_value(operand) for operand in function.forward.operands]
        dtypes = {i: v.dtype for i, v in enumerate(operands) if v is not None and v.is_floating_point()}
        _cast_results(function.backward.module, dtypes)
        node.meta["val"] = type(node.meta["val"])(values)

    def _hook(self, node: Node, hook: Body) -> None:
        """Rewrite the body for the tensor's new dtype, because autograd accepts a gradient of that dtype only."""
        self._body(hook.module, hook.operands)
        node.meta["val"] = tensor = hook.operands[0].meta["val"]
        _cast_results(hook.module, {0: tensor.dtype})

    def _body(self, body: GraphModule, operands: Any) -> list[Any]:
        grad = self._casts.grad_enabled
        origins = [self._casts.origin(operand) for operand in operands]
        inner = _Rewriter(body, self._context, grad, origins, per_region=not self._casts.in_region)
        for placeholder, operand in zip(body.graph.find_nodes(op="placeholder"), operands, strict=True):
            value = map_arg(operand, lambda node: node.meta["val"])
            placeholder.meta["val"] = fake_like(value, self._context.mode)
        for key, count in inner.rewrite().items():
            self._counts[key] += count
        return _results(body)


def _written_later(node: Node) -> bool:
    """Whether what shares the memory of ``node`` is written to after it."""
    sets, later = AliasSets(node.graph), False
    for other in node.graph.nodes:
        if later and any(sets.shared(node, source) for source in writes(other)):
            return True
        later = later or other is node
    return False


def _dtypes(value: Any) -> list[torch.dtype]:
    return [leaf.dtype for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _differ(a: Any, b: Any) -> bool:
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype != b.dtype


def _results(body: GraphModule) -> list[Any]:
    results = pytree.tree_leaves(returned(body.graph))
    return [n.meta["val"] if isinstance(n, Node) else n for n in results]


def _cast_results(body: GraphModule, dtypes: dict[int, torch.dtype]) -> None:
    """Cast the results of a body, given by position, to ``dtypes``."""
    output = graph_output(body.graph)
    results, structure = pytree.tree_flatten(output.args[0])
    writer = CastWriter(body.graph, grad=True)
    for index, dtype in dtypes.items():
        value = tensor_value(results[index]) if index < len(results) else None
        if value is not None and value.is_floating_point() and value.dtype != dtype:
            results[index] = writer.cast(results[index], dtype, output, "the caller expects this dtype")
    output.args = (pytree.tree_unflatten(results, structure),)


def _call_instead(node: Node, target: OpOverload) -> None:
    """Call another overload of the same op; write out the old overload's defaults if the new one lacks them."""
    assert isinstance(node.target, OpOverload)
    defaults = {parameter.name: parameter.default_value for parameter in node.target._schema.arguments}
    for position, parameter in enumerate(target._schema.arguments):
        has_value = position < len(node.args) or parameter.name in node.kwargs
        if not has_value and not parameter.has_default_value() and defaults.get(parameter.name) is not None:
            node.update_kwarg(parameter.name, defaults[parameter.name])
    node.target = target
