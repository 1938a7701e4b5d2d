"""Make a rewritten module run in its caller's grad mode, and leave that, autocast and torch.func as they were.

Dynamo records the end of a block under ``no_grad`` as a call that sets the grad mode of the capture. torch.compile
captures again in another mode; a rewritten module is captured once.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.fx import GraphModule, Node

from fxamp.capture.autocast_state import regions_closed_on_error
from fxamp.capture.regions import DIFFERENTIATING
from fxamp.graph import first_computation
from fxamp.graph.higher_order_ops import bodies

P = ParamSpec("P")
T = TypeVar("T")

_SET_GRAD = torch._C._set_grad_enabled


def follow_grad_mode(gm: GraphModule, ambient: bool = True) -> None:
    """Let each block that restores ``ambient``, the grad mode of the capture, restore the caller's mode instead.

    A block that differentiates keeps its own mode.
    """
    now, ends = ambient, []
    for node in gm.graph.nodes:
        if node.target is _SET_GRAD:
            before, now = now, bool(node.args[0])
            if now == ambient != before and not _differentiates(node):
                ends.append(node)
        for body in bodies(node):
            follow_grad_mode(body.module, now)
    if not ends:
        return
    with gm.graph.inserting_before(first_computation(gm.graph)):
        mode = gm.graph.call_function(torch.is_grad_enabled)
    mode.meta["val"] = ambient
    for end in ends:
        end.args = (mode,)
    gm.recompile()


def _differentiates(node: Node) -> bool:
    """Whether a call between ``node`` and the next change of the grad mode computes gradients."""
    node = node.next
    while node.op != "output" and node.target is not _SET_GRAD:
        if node.target is torch.autograd.grad or getattr(node.target, "__name__", "") == DIFFERENTIATING:
            return True
        node = node.next
    return False


def keep_callers_state(gm: GraphModule) -> None:
    """Let each call of ``gm`` restore grad mode, autocast and torch.func's transforms, even if it raises."""
    codegen: Any = gm.graph._codegen
    kind: Any = type(codegen)
    if any(value is _restoring for _, value in codegen.additional_globals()):  # a rewritten module's, as a source
        return

    class Guarded(kind):  # type: ignore[misc]
        """Writes a ``forward`` with a decorator."""

        def gen_fn_def(self, *args: Any, **options: Any) -> str:
            return f"@{_restoring.__name__}\n{super().gen_fn_def(*args, **options)}"

        def additional_globals(self) -> list[tuple[str, Any]]:
            return [*super().additional_globals(), (_restoring.__name__, _restoring)]

    codegen.__class__ = Guarded
    gm.recompile()


def _restoring(forward: Callable[P, T]) -> Callable[P, T]:
    @wraps(forward)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():  # compilers record the changes of state, and restore it themselves
            return forward(*args, **kwargs)
        with regions_closed_on_error(), torch.set_grad_enabled(torch.is_grad_enabled()):
            return forward(*args, **kwargs)

    return call
