"""The scaled backward without a backward graph: what crosses the border of an eager region is scaled on its way back.

Inputs enter the region, outputs leave it; forward, both are the identity. Within, every gradient is kept times the
scale. So a gradient that enters is multiplied by the scale, and one that leaves by its inverse, whichever pass it is:
the backward of entering is leaving, that of leaving is entering. If the first pass multiplied by ``factor`` on the way,
the derivative has that factor too:

    forward     enter 1                  leave 1
    backward    leave 1/scale            enter scale
    second      enter 1/scale * scale    leave scale * 1/scale
    third       leave ...                and so on: gradient penalties work, at any depth

Gradients that leave are checked, and reported with the parameter that they belong to. Gradients in float16 hold the
scale outside too, where ``scale`` has walked through, and cross as they are (fxamp/scaler/float16_flow.py).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fxamp.dtypes import HALVES
from fxamp.errors import OptionError
from fxamp.graph import AliasSets, inner_tensors
from fxamp.scaler import GradScaler
from fxamp.scaler.borders import crossed, product, reciprocal
from fxamp.torch_private import is_leaf


def scale_eagerly(run: Callable[..., Any], gm: GraphModule, scaler: GradScaler) -> Callable[..., Any]:
    """Wrap ``run``, which runs ``gm`` eagerly on the same inputs, so that its backward is scaled by ``scaler``.

    Raises OptionError for a call in which ``gm`` writes to an input that gradients flow through: what the caller does
    with that input afterwards would send true gradients into the region.
    """
    aliases = AliasSets(gm.graph)
    inputs = gm.graph.find_nodes(op="placeholder")
    written = [(at, node.name) for at, node in enumerate(inputs) if aliases.mutated(node)]

    def scaled(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(*args)
        _refuse_writes(args, written)
        entered = [_enter(value, scaler) for value in args]
        results = run(*entered)
        _refuse_writes(args, written)
        return _leave(results, args, entered, scaler)

    return scaled


def _differentiable(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _enter(value: Any, scaler: GradScaler) -> Any:
    return _cross(_Enter, value, None, scaler, value) if _differentiable(value) else value


def _leave(results: Any, args: Sequence[Any], entered: Sequence[Any], scaler: GradScaler) -> Any:
    outside = {id(inside): outer for inside, outer in zip(entered, args, strict=True)}
    tensors = {id(value): value for value in (*args, *pytree.tree_leaves(results)) if isinstance(value, Tensor)}
    shares = Counter(memory for value in tensors.values() for memory in _memory(value))

    def leave(value: Any) -> Any:
        if id(value) not in outside and _differentiable(value):
            shared = any(shares[memory] > 1 for memory in _memory(value))
            outside[id(value)] = _cross(_Leave, value, None, scaler, shared)
        return outside.get(id(value), value)

    return pytree.tree_map(leave, results)


def _memory(value: Tensor) -> set[int]:
    """What tells memory apart: the storages of the tensor, or of those inside it."""
    return {
        inner.untyped_storage()._cdata if inner.layout is torch.strided else id(inner) for inner in inner_tensors(value)
    }


def _refuse_writes(args: Sequence[Any], written: Sequence[tuple[int, str]]) -> None:
    for at, name in written:
        if _differentiable(args[at]):
            raise OptionError(
                f"a compiled graph writes in place to its input {name!r}, through which gradients flow: with a scaler, "
                "lowering = 'eager' cannot follow that; accepted: 'aot_eager', 'inductor', or to write to a copy"
            )


class _Enter(torch.autograd.Function):
    """The way into the region; backward, out of it."""

    fxamp_border = "in"

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: Tensor | None, scaler: GradScaler, owner: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.factor, ctx.scaler = factor, scaler
        ctx.owner = owner if isinstance(owner, nn.Parameter) else None
        return value.view_as(value) if factor is None else product(value, factor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        if gradient is None:
            return None, None, None, None
        inverse = reciprocal(ctx.scaler.graph_scale(gradient.device))
        stays = _holds_the_scale(ctx, gradient) and not is_leaf(ctx.next_functions[0][0])
        true = _cross(_Leave, gradient, ctx.factor if stays else _joined(ctx.factor, inverse), ctx.scaler, False)
        with torch.no_grad():
            parts = inner_tensors(true)  # of a DTensor this rank's: ranks agree at the step
            found = torch.stack([torch.isfinite(part).all().logical_not() for part in parts])
        ctx.scaler.record_graph_flags([ctx.owner] * len(parts), found, parts)
        return true, None, None, None


class _Leave(torch.autograd.Function):
    """The way out of the region; backward, into it. ``shared``: other tensors outside lie in the same memory."""

    fxamp_border = "out"

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: Tensor | None, scaler: GradScaler, shared: bool) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.factor, ctx.scaler = factor, scaler
        if factor is not None:
            return product(value, factor)
        # Views of a custom function refuse to be written to, which is right where another tensor would not learn of
        # it. A detached tensor is none, and still counts as written to where the region saved it.
        return value.view_as(value) if shared else value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        if gradient is None:
            return None, None, None, None
        scale = ctx.scaler.graph_scale(gradient.device)
        factor = ctx.factor if _holds_the_scale(ctx, gradient) else _joined(ctx.factor, scale)
        return _cross(_Enter, gradient, factor, ctx.scaler, None), None, None, None


def _cross(border: type[torch.autograd.Function], value: Tensor, *rest: Any) -> Tensor:
    crossed: Tensor = border.apply(value, *rest)  # type: ignore[no-untyped-call]
    return crossed


def _joined(factor: Tensor | None, other: Tensor) -> Tensor:
    return other.clone() if factor is None else factor * other


def _holds_the_scale(node: Any, gradient: Tensor) -> bool:
    """Whether ``gradient`` holds the scale outside of the region too: float16 does, where ``scale`` walked through."""
    return crossed(node) and gradient.dtype in HALVES
