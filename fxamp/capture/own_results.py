"""Every result of a traced call is a tensor of its own.

Many calls return their own input where there is nothing to do: ``h.float()`` on float32, ``h.contiguous()``, dropout in
eval mode. make_fx knows tensors by identity, so it would take every later use of ``h`` for a use of the call. Under a
policy the call may convert, and then ``h`` and its result are two tensors. So the result becomes an alias of the input,
and the input keeps its node. A call that writes to its input gives the input a new node, as in make_fx.
"""

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, get_proxy_slot, set_proxy_slot
from torch.utils import _pytree as pytree


class OwnResults(ProxyTorchDispatchMode):  # type: ignore[no-untyped-call]
    """make_fx's tracing mode, with results that are never one of the inputs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        nodes = {
            id(leaf): self.node_of(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        }
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(func, OpOverload) and func._schema.is_mutable:
            return result
        return pytree.tree_map_only(Tensor, lambda tensor: self._own(tensor, nodes.get(id(tensor))), result)

    def node_of(self, tensor: Tensor) -> Any:
        """What the tracer knows the tensor by; None if it was not traced."""
        return get_proxy_slot(tensor, self.tracer, None)

    def restore(self, tensor: Tensor, node: Any) -> None:
        """Make the tracer know the tensor by ``node`` again, an earlier answer of :meth:`node_of`."""
        set_proxy_slot(tensor, self.tracer, node)

    def _own(self, tensor: Tensor, earlier: Any) -> Tensor:
        made = self.node_of(tensor)
        if earlier is None or made is earlier:
            return tensor
        # A view that is made without grad mode refuses to be written to within it; a detached tensor does not.
        own = torch.ops.aten.alias.default(tensor) if torch.is_grad_enabled() else tensor.detach()
        self.restore(tensor, earlier)
        self.restore(own, made)
        return own


def tracing_mode() -> OwnResults:
    """The tracing mode of the make_fx call that is running, as :class:`OwnResults`.

    make_fx makes its mode itself and takes no other, so the mode's class is replaced.
    """
    modes: Any = torch._ops
    mode: Any = modes._get_dispatch_mode_pre_dispatch(torch._C._TorchDispatchModeKey.PROXY)
    mode.__class__ = OwnResults
    own: OwnResults = mode
    return own
