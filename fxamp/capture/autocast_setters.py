"""Turn calls of ``torch.set_autocast_enabled`` and ``torch.set_autocast_dtype`` into autocast regions.

fxamp follows autocast by its regions. A call that sets the state opens one, which ends at the next such call, or with
the region around it: there torch.autocast restores the state from before.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fxamp.capture.autocast_state import AutocastStates, autocast_states, casts_to
from fxamp.errors import CaptureError
from fxamp.graph import ENTER_AUTOCAST, EXIT_AUTOCAST, describe_source

_SETTERS = (torch.set_autocast_enabled, torch.set_autocast_dtype)


@dataclass
class _Region:
    """A region of the program, or the whole graph: the states ``before`` it and at its start, and marks ``opened``."""

    before: AutocastStates
    start: AutocastStates
    opened: list[Node] = field(default_factory=list)

    def close(self, gm: GraphModule, at: Node) -> None:
        """Close before ``at`` what is open."""
        with gm.graph.inserting_before(at):
            while self.opened:
                gm.graph.call_function(EXIT_AUTOCAST, (self.opened.pop(),))

    def open(self, gm: GraphModule, at: Node, states: AutocastStates) -> None:
        """Open before ``at`` regions for the devices whose state is not that at the start of this region."""
        changed = {device: state for device, state in states.items() if state != self.start[device]}
        with gm.graph.inserting_before(at):
            for device, (enabled, dtype) in changed.items():
                self.opened.append(gm.graph.call_function(ENTER_AUTOCAST, (device, dtype, enabled, True)))


def setters_as_regions(gm: GraphModule) -> AutocastStates:
    """Replace such calls in ``gm`` itself, not in bodies; return the states that the program leaves changed."""
    if not _setters(gm):
        return {}
    states = autocast_states()
    regions = [_Region(states, states)]
    for node in list(gm.graph.nodes):
        if node.target is ENTER_AUTOCAST:
            device, dtype, enabled, _ = node.args
            dtype = states[device][1] if dtype is None else dtype
            inside = states | {device: (bool(enabled) and casts_to(device, dtype), dtype)}
            regions.append(_Region(states, inside))
            states = inside
        elif node.target is EXIT_AUTOCAST:
            regions[-1].close(gm, node)
            states = regions.pop().before
        elif node.target in _SETTERS:
            states = states | _set(node, states)
            regions[-1].close(gm, node)
            regions[-1].open(gm, node, states)
            gm.graph.erase_node(node)
        elif node.op == "output":
            regions[0].close(gm, node)
    gm.recompile()
    return {device: state for device, state in states.items() if state != regions[0].before[device]}


def with_regions(gm: GraphModule) -> GraphModule:
    """Return ``gm`` itself if it has no such calls, else a copy with regions.

    Raises:
        CaptureError: it leaves the state changed, which only a graph that Dynamo runs can.
    """
    setters = _setters(gm)
    if not setters:
        return gm
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))  # deepcopy would copy more than the graph
    copy = GraphModule(gm, graph, type(gm).__name__)
    copy.meta.update(gm.meta)
    if setters_as_regions(copy):
        raise CaptureError(
            f"{describe_source(setters[-1])}: autocast's state is set to {setters[-1].args} and not set back, and the "
            "captured graph cannot leave autocast's state changed; accepted: with torch.autocast(...)"
        )
    return copy


def leaving(run: Callable[..., Any], states: AutocastStates) -> Callable[..., Any]:
    """Return ``run``, after which autocast has ``states``."""
    if not states:
        return run

    @wraps(run)
    def run_and_set(*args: Any) -> Any:
        results = run(*args)
        for device, (enabled, dtype) in states.items():
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        return results

    return run_and_set


def _setters(gm: GraphModule) -> list[Node]:
    return [node for target in _SETTERS for node in gm.graph.find_nodes(op="call_function", target=target)]


def _set(node: Node, states: AutocastStates) -> AutocastStates:
    """Return the state that a call sets; without a device it is that of "cuda"."""
    name = "enabled" if node.target is torch.set_autocast_enabled else "dtype"
    value: Any = node.kwargs[name] if name in node.kwargs else node.args[-1]
    device: Any = "cuda"
    if len(node.args) + len(node.kwargs) == 2:
        device = node.kwargs["device_type"] if "device_type" in node.kwargs else node.args[0]
    enabled, dtype = states[device]
    return {device: (value, dtype) if name == "enabled" else (enabled, value)}
