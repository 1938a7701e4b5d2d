"""float16 outside compiled graphs: gradients in float16 are scaled, all others are unscaled.

Code before, between and after compiled graphs is eager, and computes in float16 under an ambient torch.autocast.
Unscaled gradients would underflow there. So outside the graphs a gradient's dtype says whether it is scaled:

    float16     scaled, as every gradient is under torch.amp.GradScaler
    any other   unscaled
    ``.grad``   unscaled, whatever its dtype

When a loss is scaled, :func:`_prepare_nodes` walks the autograd graph from it and hooks the eager nodes that have
float16 on one side and a wider dtype on the other. Such a node multiplies incoming float32 gradients by the scale and
divides outgoing ones by it. A backward is linear in its incoming gradients, so the hooks change only the range of the
values. Compiled graphs know that float16 tangents are scaled, and return float16 gradients scaled.

Cost: one walk over the eager nodes for each scaled loss, and one product wherever the dtype changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fxamp.errors import UnscaledError
from fxamp.graph.depth_first import depth_first
from fxamp.optim.gradients import reciprocal
from fxamp.scaler.outside_graphs.borders import (
    Border,
    border_of,
    compiled_by_others,
    is_custom,
    note_crossed,
    note_hooked,
)
from fxamp.scaler.outside_graphs.nested import REMEDY, refuse_nested, refuse_reentrant
from fxamp.scaler.scale import BackwardScaler, times
from fxamp.torch_dtypes import HALVES
from fxamp.torch_private import Node, autocast_dtype_of, gradient_dtypes, inner_nodes, is_leaf, untraced

Gradients = tuple[Tensor | None, ...]


def begin(loss: Tensor, scaler: BackwardScaler) -> Tensor:
    """Return ``loss``, prepared for a backward in which float16 gradients are scaled.

    Returns the same tensor unless ``loss`` is float16: a 0-dim float16 loss becomes float32, as multiplication by the
    scale would make it; any other float16 loss is copied.

    Raises:
        UnscaledError: gradients would reach a float16 parameter, a reentrant checkpoint that computes in float16, only
            graphs of another scaler, or one of these through float16 code.
    """
    if loss.dtype in HALVES:
        loss = loss.float() if loss.dtype == torch.float16 and loss.dim() == 0 else loss.clone()
    root = loss.grad_fn
    if root is None:
        return loss
    if loss.dtype in HALVES:
        root.register_prehook(partial(_scale_all, scaler))
    _prepare_nodes(root, scaler)
    return loss


def _prepare_nodes(root: Node, scaler: BackwardScaler) -> None:
    """Walk from ``root`` to the leaves, and mark or hook each node by the rule above; raises as :func:`begin` does."""
    dtypes: dict[Node, list[bool]] = {}  # functools.cache takes longer to make than the walk of a compiled model

    def halves(node: Node) -> list[bool]:
        if node not in dtypes:
            dtypes[node] = [dtype in HALVES for dtype in gradient_dtypes(node)]
        return dtypes[node]

    own, other = False, None
    stack, nodes = [(root, False)], {root}
    while stack:
        node, inside = stack.pop()
        border = border_of(node)
        if border is not None:
            own, other = (True, other) if border.scaler is scaler else (own, border)
        if border is not None and border.last and not border.in_float16:
            continue
        edges = node.next_functions
        # Inside an eager region every gradient is scaled. In backward order the region begins at its exit node.
        within = inside if border is None else border.way == "out"
        if not (inside and within) and (border is None or border.in_float16):
            entering = [] if inside else halves(node)
            leaving = [None if within or function is None else halves(function)[at] for function, at in edges]
            if border is not None or True in entering or True in leaving or is_custom(node):
                _prepare(_Site(node, border, entering, leaving, edges), scaler)
        for function in inner_nodes(edges):
            if function not in nodes:
                nodes.add(function)
                stack.append((function, within))
    if other is not None and not own:
        raise _of_another(scaler, other)


def require_no_graphs(loss: Tensor, scaler: BackwardScaler) -> None:
    """Raise UnscaledError if gradients of ``loss`` would enter graphs, while no graph was compiled with ``scaler``."""
    roots = [] if loss.grad_fn is None else [loss.grad_fn]
    for node in depth_first(roots, lambda node: inner_nodes(node.next_functions)):
        border = border_of(node)
        if border is not None:
            raise _of_another(scaler, border)


def _of_another(scaler: BackwardScaler, border: Border) -> UnscaledError:
    return UnscaledError(
        f"a loss is scaled by {scaler!r}, but its graphs were compiled with options={{'scaler': {border.scaler!r}}}, "
        "which would never adapt its scale, so steps could be skipped forever; accepted: scale, step and update of "
        "the scaler in the options. What torch.compile returns is copied with its options: copy the scaler with it, "
        'copy.deepcopy((compiled, scaler)), or compile a copy of the model with options={"scaler": scaler}'
    )


@dataclass(frozen=True)
class _Site:
    """A node, and which of its incoming and outgoing gradients are float16, by edge.

    ``leaving`` holds None for an edge without a gradient.
    """

    node: Node
    border: Border | None
    entering: Sequence[bool]
    leaving: Sequence[bool | None]
    edges: Sequence[tuple[Node, int]]

    @property
    def crossing(self) -> bool:
        """Whether a gradient on either side is float16."""
        return True in self.entering or True in self.leaving

    def float16_leaves(self) -> frozenset[int]:
        """Return which gradients end in a float16 ``.grad``; raise UnscaledError if one is a parameter's."""
        ends = [(at, self.edges[at][0]) for at, half in enumerate(self.leaving) if half]
        leaves = {at: function.variable for at, function in ends if is_leaf(function)}
        for variable in leaves.values():
            if isinstance(variable, nn.Parameter):
                raise UnscaledError(
                    f"a float16 parameter of shape {tuple(variable.shape)} gets a gradient, which underflows without "
                    "the scale; accepted with a scaler in the options: float32 parameters, so no .half(), and no "
                    f"MixedPrecisionPolicy(param_dtype=torch.float16) of FSDP2. {REMEDY}"
                )
        return frozenset(leaves)


def _prepare(site: _Site, scaler: BackwardScaler) -> None:
    """Reject, mark or hook one node by the rule above."""
    node, leaves = site.node, site.float16_leaves()
    if site.border is not None:
        if site.crossing:
            _require_own(site.border, scaler)
            note_crossed(node)
        return
    if is_custom(node):
        refuse_reentrant(node, site.crossing)
        if not (site.crossing or _computes_in_float16(node)):
            return
    widens, narrows = bool(leaves) or False in site.leaving, False in site.entering
    guarded = is_custom(node) and not compiled_by_others(node)
    if not (widens or narrows or guarded) or not note_hooked(node):
        return
    if guarded:
        refuse_nested(node)
    if narrows:
        node.register_prehook(partial(_enter_all, scaler))
    if widens:
        node.register_hook(partial(_leave_all, scaler, leaves))


def _computes_in_float16(node: Node) -> bool:
    """Whether a Python-defined node may compute in float16 inside, even if its gradients have a wider dtype."""
    return autocast_dtype_of(node) in HALVES or compiled_by_others(node)


def _require_own(border: Border, scaler: BackwardScaler) -> None:
    if border.scaler is not scaler:
        raise UnscaledError(
            "float16 gradients of a loss scaled by one scaler would enter a graph compiled with another scaler; "
            "accepted: one scaler for both, or float32 between them"
        )


@untraced
def _scale_all(scaler: BackwardScaler, gradients: Gradients) -> Gradients:
    return tuple(_scaled(gradient, scaler) for gradient in gradients)


@untraced
def _enter_all(scaler: BackwardScaler, gradients: Gradients) -> Gradients:
    return tuple(_entering(gradient, scaler) for gradient in gradients)


@untraced
def _leave_all(scaler: BackwardScaler, leaves: frozenset[int], results: Gradients, _: Gradients) -> Gradients:
    return tuple(_leaving(gradient, scaler, at in leaves) for at, gradient in enumerate(results))


def _entering(gradient: Tensor | None, scaler: BackwardScaler) -> Tensor | None:
    return gradient if gradient is None or gradient.dtype in HALVES else _scaled(gradient, scaler)


def _leaving(gradient: Tensor | None, scaler: BackwardScaler, leaf: bool) -> Tensor | None:
    if gradient is None or (gradient.dtype in HALVES and not leaf):
        return gradient
    return times(gradient, reciprocal(scaler.graph_scale(gradient.device)))


def _scaled(gradient: Tensor | None, scaler: BackwardScaler) -> Tensor | None:
    return None if gradient is None else times(gradient, scaler.graph_scale(gradient.device))
