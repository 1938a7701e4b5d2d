"""Scale a backward without a backward graph: scale gradients where they enter and leave an eager region.

Inputs enter the region and outputs leave it; in the forward both are the identity. Inside, every gradient is scaled. So
a gradient that enters the region is multiplied by the scale, and one that leaves it by the inverse, in every
differentiation: the backward of entering is leaving, and the reverse. If the first pass multiplied by ``factor``, its
derivative has that factor too:

    forward     enter 1                  leave 1
    backward    leave 1/scale            enter scale
    second      enter 1/scale * scale    leave scale * 1/scale
    third       leave ...                and so on: gradient penalties work, at any depth

Gradients that leave are checked, and reported with the parameter that they belong to. float16 gradients that the
scaler's walk found are scaled outside the region too, and cross unchanged (``float16_scaling.py``).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fxamp.errors import OptionError
from fxamp.graph import AliasSets, inner_tensors
from fxamp.optim.gradients import reciprocal
from fxamp.scaler.outside_graphs.borders import crossed
from fxamp.scaler.scale import BackwardScaler, times
from fxamp.torch_dtypes import HALVES
from fxamp.torch_private import is_leaf, untraced


def scale_eagerly(run: Callable[..., Any], gm: GraphModule, scaler: BackwardScaler) -> Callable[..., Any]:
    """Wrap ``run``, which runs ``gm`` eagerly on the same inputs, so that ``scaler`` scales its backward.

    Raises OptionError for a call in which ``gm`` writes to an input that needs a gradient: later uses of that input
    outside the region would send unscaled gradients into the region.
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


def _enter(value: Any, scaler: BackwardScaler) -> Any:
    return _cross(_Enter, value, None, scaler, value) if _differentiable(value) else value


def _leave(results: Any, args: Sequence[Any], entered: Sequence[Any], scaler: BackwardScaler) -> Any:
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
    """Return ids of the memory of a tensor: its storage, or those of the tensors inside a wrapper."""
    return {
        inner.untyped_storage()._cdata if inner.layout is torch.strided else id(inner) for inner in inner_tensors(value)
    }


def _refuse_writes(args: Sequence[Any], written: Sequence[tuple[int, str]]) -> None:
    for at, name in written:
        if _differentiable(args[at]):
            raise OptionError(
                f"a compiled graph writes in place to its input {name!r}, which needs a gradient: with a scaler, "
                "lowering = 'eager' does not support that; accepted: 'aot_eager', 'inductor', or writing to a copy"
            )


class _Enter(torch.autograd.Function):
    """The entry of the region; in the backward, its exit."""

    fxamp_border = "in"

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: Tensor | None, scaler: BackwardScaler, owner: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.factor, ctx.scaler = factor, scaler
        ctx.owner = owner if isinstance(owner, nn.Parameter) else None
        return value.view_as(value) if factor is None else times(value, factor)

    @staticmethod
    @untraced
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        if gradient is None:
            return None, None, None, None
        inverse = reciprocal(ctx.scaler.graph_scale(gradient.device))
        stays = _holds_the_scale(ctx, gradient) and not is_leaf(ctx.next_functions[0][0])
        true = _cross(_Leave, gradient, ctx.factor if stays else _joined(ctx.factor, inverse), ctx.scaler, False)
        with torch.no_grad():
            # Of a DTensor only this rank's part: the ranks agree at the step.
            parts = [part._values() if part.is_sparse else part for part in inner_tensors(true)]
            flags = torch.stack([torch.isfinite(part).all().logical_not() for part in parts])
        if not ctx.scaler.used:
            ctx.scaler.note_unused(flags)
        owner = None if ctx.owner is None else ref(ctx.owner)
        ctx.scaler.graphs.record(lambda: [owner] * len(parts), flags, parts)
        return true, None, None, None


class _Leave(torch.autograd.Function):
    """The exit of the region; in the backward, its entry. ``shared``: other tensors outside use the same memory."""

    fxamp_border = "out"

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: Tensor | None, scaler: BackwardScaler, shared: bool) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.factor, ctx.scaler = factor, scaler
        if factor is not None:
            return times(value, factor)
        # torch forbids writes to views from a custom Function. That is right if another tensor shares the memory.
        # Otherwise return a detached tensor: writes work, and still invalidate what the region saved.
        return value.view_as(value) if shared else value.detach()

    @staticmethod
    @untraced
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
    """Whether ``gradient`` is scaled outside the region too: it is float16 and the scaler's walk found the region."""
    return crossed(node) and gradient.dtype in HALVES
