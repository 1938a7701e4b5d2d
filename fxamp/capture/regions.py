"""The regions that a program opens and closes: autocast, inference mode, torch.func transforms.

1. An autocast region is recorded by its two marks. Its autocast state holds while it is traced, because a program may
   be valid only in that state (``mm`` of float32 and bfloat16). ``torch.autocast`` is not used, because it raises for
   devices missing in this build of torch.
2. ``torch.inference_mode`` becomes grad mode, off and on again. Autograd then rejects no tensor of the graph later, and
   fxamp follows a single state to know where gradients are on.
3. Inside a torch.func transform everything is left verbatim, autocast regions included. So is each later call that
   reads a value which is still wrapped: ``torch.func.vjp`` differentiates when its transform is over.
"""

import operator
from typing import Any

import torch
from torch.autograd import grad_mode
from torch.fx import Graph, Node

from fxamp.capture.autocast_state import casts_to
from fxamp.capture.recorded_values import recorded_value
from fxamp.errors import CaptureError
from fxamp.graph import ENTER_AUTOCAST, EXIT_AUTOCAST, fake_tensors, nesting_change

#: Key of ``node.meta`` of a node that was left verbatim: the reason.
VERBATIM = "fxamp_verbatim"

#: Why the calls of a transform are left verbatim.
IN_TRANSFORM = "inside a torch.func transform, whose wrapped values cannot be followed"

#: The calls that return values of a transform without their wrappers.
_UNWRAPPING = frozenset(("_unwrap_for_grad", "_remove_batch_dim", "_unpack_dual"))

#: What torch.func.vjp calls when its transform is over.
DIFFERENTIATING = "_autograd_grad"

_ENTER_INFERENCE = getattr(grad_mode, "_enter_inference_mode", None)
_EXIT_INFERENCE = getattr(grad_mode, "_exit_inference_mode", None)


def is_mark(node: Node) -> bool:
    """Whether ``node`` opens or closes a region of autocast or of inference mode.

    If Dynamo marks inference mode in another way, the capture of a graph with inference mode fails.
    """
    return node.target in (ENTER_AUTOCAST, EXIT_AUTOCAST) or _is_inference(node)


def _is_inference(node: Node) -> bool:
    return node.op == "call_function" and node.target in (_ENTER_INFERENCE, _EXIT_INFERENCE)


class Regions:
    """The open regions of one traced graph; the marks go to ``graph``."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._outer_autocast: list[tuple[str, bool, torch.dtype]] = []
        self._transforms = 0
        self._wrapped: set[Node] = set()

    def inside_transform(self, node: Node) -> bool:
        """Whether the node is part of a torch.func transform, or reads a wrapped value of one that is over.

        The calls that open and close a transform are part of it. So is what ``torch.func.vjp`` calls to differentiate,
        whose graph may have none of them: after a graph break, its inputs are wrapped values.
        """
        before = self._transforms
        self._transforms += nesting_change(node.target)
        inside = max(before, self._transforms) > 0
        reads = not self._wrapped.isdisjoint(node.all_input_nodes)
        name = getattr(node.target, "__name__", "")
        unwrapped = name in _UNWRAPPING or (node.target is operator.getitem and not reads)
        if inside and not unwrapped and fake_tensors(recorded_value(node)):
            self._wrapped.add(node)
        return inside or reads or name == DIFFERENTIATING

    def mark(self, node: Node, args: tuple[Any, ...]) -> Any:
        """Enter or leave the region that the mark ``node`` opens or closes; its arguments have the values ``args``."""
        if _is_inference(node):
            return self._inference(node, args)
        mark = self._graph.create_node("call_function", node.target, args, {})
        mark.meta["val"] = None
        if self._transforms:
            mark.meta[VERBATIM] = IN_TRANSFORM
        if node.target is EXIT_AUTOCAST:
            device, enabled, dtype = self._outer_autocast.pop()
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
            return None
        device, dtype, enabled, _ = args
        self._outer_autocast.append((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)))
        if dtype is not None:
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_enabled(device, enabled and casts_to(device, torch.get_autocast_dtype(device)))
        return mark

    def _inference(self, node: Node, args: tuple[Any, ...]) -> bool | None:
        """Set the grad mode, which the tracer records; return the mode before an opening mark, None for a closing."""
        (value,) = args
        if node.target is _EXIT_INFERENCE:
            torch._C._set_grad_enabled(value)
            return None
        if not value and torch.is_inference_mode_enabled():
            raise CaptureError(
                "torch.inference_mode(False) inside torch.inference_mode() around the compiled call: its gradients "
                "would be lost; accepted: torch.no_grad() around the call"
            )
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(not value)
        return before
