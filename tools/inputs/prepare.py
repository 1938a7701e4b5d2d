"""A captured program to which policies can be applied one after another, each to a fresh copy."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import GraphModule

from fxamp.capture import Captured, capture
from fxamp.graph import all_nodes
from fxamp.graph_text import Entry, Listing, TensorType
from fxamp.passes.base import CastContext
from fxamp.pipeline import cast_graph
from fxamp.policy import Policy
from fxamp.reports.kept import kept_bytes
from fxamp.reports.list_graph import list_graph
from fxamp.reports.record import record_graph
from fxamp.tools.inputs.expressions import Opaque
from fxamp.tools.inputs.partitioned import kept_values

_OPAQUE = "fxamp.opaque."


@dataclass(frozen=True)
class ProgramGraph:
    """One graph of a program, with FakeTensors on the CPU for its inputs, whatever its device is.

    ``devices`` are the devices of the inputs, by name. ``original`` restores the program's own names for symbols;
    ``fixed`` lists the symbols that had to become numbers. ``ended`` is the reason for the graph break that ended the
    graph, if there was one. ``device`` is the program's device ("cuda"), ``""`` if unknown.
    """

    name: str
    module: GraphModule
    inputs: list[Any]
    device: str = ""
    ended: str = ""
    warnings: tuple[str, ...] = ()
    devices: Mapping[str, str] = field(default_factory=dict)
    original: Callable[[str], str] = str
    fixed: Callable[[], list[str]] = list

    def captured(self) -> Captured:
        """Return a new pre-dispatch ATen graph."""
        return capture(self.module, self.inputs)

    def listing(self, policy: Policy, chosen: str, partitioned: bool = False) -> Listing:
        """Return the listing of the graph under ``policy``, which is resolved; ``chosen`` says why this policy.

        With ``partitioned`` it lists the values that a compiled forward keeps for the backward. Raises BannedOpError if
        the policy bans an op of the graph.
        """
        captured = self.captured()
        before = kept_bytes(captured.module, captured.mode)
        context = CastContext(captured.mode, policy, every_device=True, ended=self.ended)
        record = record_graph(cast_graph(captured, context), chosen)
        after = kept_bytes(captured.module, captured.mode)
        values = kept_values(captured.module, self.inputs, policy) if partitioned else ()
        listing = replace(record.listing, name=self.name, kept_before=before, kept_after=after, kept=values)
        return self._in_its_words(listing, policy.device)

    def plain_listing(self) -> Listing:
        """Return the listing of the captured graph, without a policy."""
        captured = self.captured()
        nbytes = kept_bytes(captured.module, captured.mode)
        listing = list_graph(captured.module, self.name, ended=self.ended, kept_before=nbytes)
        return self._in_its_words(listing, self.device or "cpu")

    def _in_its_words(self, listing: Listing, device: str) -> Listing:
        """Restore the program's own devices, symbol names, and names of functions that are unknown here."""
        unknown = {
            node.target.__qualname__: node.target.path
            for node in all_nodes(self.module)
            if isinstance(node.target, Opaque)
        }
        entries = tuple(self._entry(entry, device, unknown) for entry in listing.entries)
        bodies = {name: self._in_its_words(body, device) for name, body in listing.bodies.items()}
        return replace(listing, entries=entries, bodies=bodies)

    def _entry(self, entry: Entry, device: str, unknown: Mapping[str, str]) -> Entry:
        here = self.devices.get(entry.name, "") or device
        target, call = entry.target, entry.call
        if target.startswith(_OPAQUE):
            path = unknown.get(target.removeprefix(_OPAQUE), target)
            target, call = _policy_name(path), call.replace(target, path)
        return replace(
            entry,
            target=target,
            call=self.original(call).replace("device(type='cpu')", f"device(type={device!r})"),
            symbol=self.original(entry.symbol),
            values=tuple(self._type(value, here) for value in entry.values),
        )

    def _type(self, value: TensorType, device: str) -> TensorType:
        shape = tuple(self.original(size) if isinstance(size, str) else size for size in value.shape)
        return TensorType(value.dtype, shape, device if value.device == "cpu" else value.device)


def _policy_name(path: str) -> str:
    """Return ``torch.ops.mylib.op.default`` as policies name it: ``mylib::op.default``."""
    return re.sub(r"^torch\.ops\.([^.]+)\.(.+)$", r"\1::\2", path)
