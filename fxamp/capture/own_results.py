"""Every result of a traced call is a tensor of its own.

Many calls return their own input where there is nothing to do: ``h.float()`` on float32, ``h.contiguous()``, dropout in
eval mode. make_fx knows tensors by identity, so it would take every later use of ``h`` for a use of the call. Under a
policy the call may convert, and then ``h`` and its result are two tensors. So:

1. The result becomes an alias of the input, and the input keeps its node.
2. A call that writes to its input gives the input a new node, as in make_fx.
3. If the schema does not say that the result may be the input, the call is left out: it does not convert, and
   functionalization would take its result for a copy, which later writes do not reach.
4. So is dropout that drops nothing: eager mode returns the input, torch's decomposition a copy.
"""

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, get_proxy_slot, set_proxy_slot
from torch.utils import _pytree as pytree

from fxamp.torch_private import replace_tracing_mode


class OwnResults(ProxyTorchDispatchMode):  # type: ignore[no-untyped-call]
    """make_fx's tracing mode, with results that never take over their input's node."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DROPOUTS and _drops_nothing(*args, **(kwargs or {})):
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
        """What the tracer knows the tensor by; None if it was not traced."""
        return get_proxy_slot(tensor, self.tracer, None)

    def restore(self, tensor: Tensor, node: Any) -> None:
        """Make the tracer know the tensor by ``node`` again, an earlier answer of :meth:`node_of`."""
        set_proxy_slot(tensor, self.tracer, node)

    def _leave_out(self, tensor: Tensor, earlier: Any) -> Tensor:
        made = self.node_of(tensor)
        if earlier is not None and made is not earlier:
            made.proxy.node.graph.erase_node(made.proxy.node)
            self.restore(tensor, earlier)
        return tensor

    def _own(self, tensor: Tensor, earlier: Any) -> Tensor:
        made = self.node_of(tensor)
        if earlier is None or made is earlier:
            return tensor
        # A view that is made without grad mode refuses to be written to within it; a detached tensor does not.
        own = torch.ops.aten.alias.default(tensor) if torch.is_grad_enabled() else tensor.detach()
        self.restore(tensor, earlier)
        self.restore(own, made)
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
    """The tracing mode of the make_fx call that is running, as :class:`OwnResults`."""
    return replace_tracing_mode(OwnResults)
