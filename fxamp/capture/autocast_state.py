"""torch.autocast's state as a context, for any device; ``torch.autocast`` raises for devices missing in this build."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.fx import GraphModule

from fxamp.devices import DEVICES
from fxamp.graph import ENTER_AUTOCAST, all_nodes
from fxamp.torch_dtypes import NARROW
from fxamp.torch_private import transforms_closed

#: For each device: whether autocast is on, and its dtype.
AutocastStates = dict[str, tuple[bool, torch.dtype]]

#: Key of ``node.meta`` of a node left verbatim: the :data:`AutocastStates` of its call, which hold in its bodies.
AUTOCAST = "fxamp_autocast"


def ambient_autocast(device: str) -> torch.dtype | None:
    """Return the dtype of the active autocast for ``device``; None if it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def casts_to(device: str, dtype: torch.dtype) -> bool:
    """Whether torch.autocast for ``device`` casts to ``dtype``; it disables itself, with a warning, if it does not."""
    return device == "cuda" or dtype in NARROW


def region_dtypes(gm: GraphModule, device: str) -> list[torch.dtype]:
    """Return the dtype of each enabled autocast region for ``device`` that a graph or a body in it opens, in order.

    A region that names no dtype has the current one of ``device``.
    """
    marks = [node for node in all_nodes(gm) if node.target is ENTER_AUTOCAST]
    opened = [
        mark.args[1] or torch.get_autocast_dtype(device) for mark in marks if mark.args[0] == device and mark.args[2]
    ]
    return [dtype for dtype in opened if isinstance(dtype, torch.dtype) and casts_to(device, dtype)]


def autocast_states() -> AutocastStates:
    """Return the current state for every device."""
    return {device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in DEVICES}


@contextmanager
def in_autocast_states(states: AutocastStates) -> Iterator[None]:
    """Set ``states``; restore those before on exit."""
    with ExitStack() as stack:
        for device, (enabled, dtype) in states.items():
            stack.enter_context(autocast_state(device, enabled, dtype))
        yield


@contextmanager
def autocast_state(device: str, enabled: bool, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Set autocast for ``device`` on or off, to ``dtype`` (None keeps the current one); restore it on exit.

    Autocast's weight cache is off: code outside the trace must not find casts that were made inside it.
    """
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_cache_enabled(False)
    if dtype is not None:
        torch.set_autocast_dtype(device, dtype)
    try:
        with regions_closed_on_error():
            yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
        torch.set_autocast_cache_enabled(cached)


@contextmanager
def regions_closed_on_error() -> Iterator[None]:
    """Close the regions of autocast, grad mode and torch.func's transforms that an exception leaves open.

    Otherwise torch would never clear autocast's weight cache again, so that eager code would read stale weights, and
    gradients would stay off.
    """
    depth, gradients, states = autocast_depth(), torch.is_grad_enabled(), autocast_states()
    cached = torch.is_autocast_cache_enabled()
    try:
        with transforms_closed():
            yield
    except BaseException:
        torch._C._set_grad_enabled(gradients)
        for device, (enabled, dtype) in states.items():
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cached)
        while autocast_depth() > depth:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
        raise


def autocast_depth() -> int:
    """Return the number of autocast regions that this thread has entered and not left."""
    inside: int = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return inside - 1
