"""Autocast regions inside a program: the autocast state at each node."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule, Node

from fxamp.capture import VERBATIM
from fxamp.capture.autocast_state import casts_to
from fxamp.graph import ENTER_AUTOCAST, EXIT_AUTOCAST
from fxamp.passes.base import CastContext


@dataclass(frozen=True)
class AutocastRegion:
    """The autocast state at a point of the program; a dtype, or None if autocast is off.

    ``lower`` is the state under the policy, ``captured`` the state while the program was captured. ``inner`` is the
    dtype of an inner region that names none. ``cached``: autocast casts a weight once for all its uses.
    """

    lower: torch.dtype | None
    captured: torch.dtype | None
    inner: torch.dtype
    cached: bool = True

    @property
    def disabled(self) -> "AutocastRegion":
        """Return the same region with autocast off."""
        return replace(self, lower=None, captured=None)


def outermost(context: CastContext) -> AutocastRegion:
    """Return the region of the whole program; an autocast around the compiled call determines ``cached``."""
    cached = torch.is_autocast_cache_enabled()
    if context.only_regions is not None:
        return AutocastRegion(None, None, context.only_regions, cached)
    return AutocastRegion(context.lower, context.captured_autocast, context.lower, cached)


def walk(gm: GraphModule, context: CastContext, region: AutocastRegion) -> Iterator[tuple[Node, AutocastRegion]]:
    """Yield every node of one graph, in order, with its region, without the marks of regions.

    Marks that are left verbatim are yielded like other calls.
    """
    outer: list[AutocastRegion] = []
    for node in list(gm.graph.nodes):
        if VERBATIM in node.meta:
            yield node, region
        elif node.target is ENTER_AUTOCAST:
            outer.append(region)
            region = _entered(node, region, context)
        elif node.target is EXIT_AUTOCAST:
            region = outer.pop()
        else:
            yield node, region


def mark_region(node: Node, region: AutocastRegion, context: CastContext) -> None:
    """Record the region of ``node`` on it, if it differs from the policy's, for use in the backward.

    AOTAutograd copies the ``"custom"`` metadata of a forward op to the ops of its backward.
    """
    if region.lower != context.lower:
        node.meta["custom"] = {**node.meta.get("custom", {}), _MARK: str(region.lower).removeprefix("torch.")}


def marked_lower(node: Node, context: CastContext) -> torch.dtype | None:
    """Return the 16-bit dtype of the region of the forward op that ``node`` belongs to; None: autocast was off."""
    noted = node.meta.get("custom", {}).get(_MARK)
    if noted is None:
        return context.lower
    dtype: torch.dtype | None = getattr(torch, noted, None)
    return dtype


_MARK = "fxamp_region"


def concerns(mark: Node, context: CastContext) -> bool:
    """Whether an enter mark is for the policy's device."""
    return context.every_device or mark.args[0] == context.policy.device


def erase_region(mark: Node) -> None:
    """Remove the marks where a region begins, ``mark``, and where it ends."""
    for node in [*(user for user in mark.users if user.target is EXIT_AUTOCAST), mark]:
        mark.graph.erase_node(node)


def _entered(mark: Node, region: AutocastRegion, context: CastContext) -> AutocastRegion:
    if not concerns(mark, context):
        return region
    device, dtype, enabled, caches = mark.args
    inner = dtype if isinstance(dtype, torch.dtype) else region.inner
    chosen = inner if enabled and casts_to(str(device), inner) else None
    return AutocastRegion(chosen, chosen, inner, region.cached if caches is None else bool(caches))
