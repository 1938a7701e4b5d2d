"""Give every result of a traced call its own tensor.

Many calls return their input if there is nothing to do: ``h.float()`` on float32, ``h.contiguous()``, dropout in eval
mode. make_fx identifies tensors by object, so it would treat every later use of ``h`` as a use of the call. Under a
policy the call may convert; then ``h`` and the result differ. So:

1. The result becomes an alias of the input, and the input keeps its node.
2. A call that writes to its input gives the input a new node, as in make_fx.
3. If the schema does not say that the result may be the input, the call is left out: it does not convert, and
   functionalization would treat its result as a copy that later writes do not change.
4. Dropout that drops nothing is left out too: eager mode returns the input, but torch's decomposition copies it.
5. ``detach_`` of an alias by rule 1 that needs no gradient is left out, because torch detaches no view in place.
"""

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from fxamp.torch_private import replace_tracing_mode
from fxamp.torch_private.parts.fx import ProxyTorchDispatchMode, get_proxy_slot, set_proxy_slot


class OwnResults(ProxyTorchDispatchMode):  # type: ignore[no-untyped-call]
    """make_fx's tracing mode, in which a result never replaces its input's node."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DROPOUTS and _drops_nothing(*args, **(kwargs or {})):
            return args[0]
        if func is torch.ops.aten.detach_.default and args[0]._is_view() and not args[0].requires_grad:
            return args[0]
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        nodes = {id(tensor): self.node_of(tensor) for tensor in tensors}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(func, OpOverload) and func._schema.is_mutable:
            return result
        if isinstance(result, Tensor) and isinstance(func, OpOverload) and not func._schema.returns[0].alias_info:
            return self._leave_out(result, nodes.get(id(result)))
        return pytree.tree_map_only(Tensor, lambda tensor: self._own(tensor, nodes.get(id(tensor))), result)

    def node_of(self, tensor: Tensor) -> Any:
        """Return the tracer's entry for the tensor; None if it was not traced."""
        return get_proxy_slot(tensor, self.tracer, None)

    def restore(self, tensor: Tensor, node: Any) -> None:
        """Set the tracer's entry for the tensor back to ``node``, an earlier result of :meth:`node_of`."""
        set_proxy_slot(tensor, self.tracer, node)

    def _leave_out(self, tensor: Tensor, earlier: Any) -> Tensor:
        entry = self.node_of(tensor)
        if earlier is not None and entry is not earlier:
            entry.proxy.node.graph.erase_node(entry.proxy.node)
            self.restore(tensor, earlier)
        return tensor

    def _own(self, tensor: Tensor, earlier: Any) -> Tensor:
        entry = self.node_of(tensor)
        if earlier is None or entry is earlier:
            return tensor
        # torch forbids writes under grad mode to a view made in no_grad mode; a detached tensor has no such limit.
        own = torch.ops.aten.alias.default(tensor) if torch.is_grad_enabled() else tensor.detach()
        self.restore(tensor, earlier)
        self.restore(own, entry)
        return own


_DROPOUTS = frozenset(
    {
        torch.ops.aten.dropout.default,
        torch.ops.aten.alpha_dropout.default,
        torch.ops.aten.feature_dropout.default,
        torch.ops.aten.feature_alpha_dropout.default,
    }
)


def _drops_nothing(input: Tensor, p: float, train: bool) -> bool:
    return not train or p == 0


def tracing_mode() -> OwnResults:
    """Return the tracing mode of the running make_fx call, as :class:`OwnResults`."""
    return replace_tracing_mode(OwnResults)
