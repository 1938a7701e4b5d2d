"""Reports on a graph while it is compiled: its dumps, its warnings, and its record for ``fxamp.report``."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from fxamp.capture import Captured, capture
from fxamp.graph_text import KeptValue
from fxamp.reports.dumps import Stages
from fxamp.reports.kept import kept_bytes
from fxamp.reports.list_graph import list_graph, list_partition
from fxamp.reports.record import CastGraph, GraphRecord, record_graph
from fxamp.reports.warnings import warn_nothing_in_fp8, warn_opaque, warn_unmatched

log = logging.getLogger(__name__)


class GraphObserver:
    """Observes the compilation of one graph, which calls it after each stage; changes no graph, and holds none.

    ``folder``: the option "dump". ``ended``: the reason for the graph break that ended the graph, if there was one.
    """

    def __init__(self, folder: Path | None, ended: str) -> None:
        self._stages, self._ended = Stages(folder), ended
        self._captured = False
        self._kept_before: int | None = None

    @property
    def dumps(self) -> bool:
        """Whether files are written, so that every stage is needed."""
        return self._stages.written

    def captured(self, graph: Captured) -> None:
        """Dump ``graph``, which has no casts so far."""
        before = self._kept_bytes(graph)
        self._stages.graph("captured", lambda: list_graph(graph.module, stage="captured", kept_before=before))
        self._captured, self._kept_before = True, before

    def cast(self, graph: CastGraph, why: str) -> GraphRecord:
        """Dump and log ``graph``, which has its casts, and return its record; ``why`` says why this policy."""
        record, policy = record_graph(graph, why), graph.context.policy
        before, after = self._kept_before, self._kept_bytes(graph.captured)
        self._stages.graph("cast", lambda: replace(record.listing, kept_before=before, kept_after=after))
        warn_unmatched(policy, record.rules, "no op of a compiled graph", "forward", "both")
        warn_nothing_in_fp8(policy, record)
        warn_opaque(graph, record)
        took = 1e3 * record.seconds
        log.info(
            "policy %s (%s): %d ops, %d casts, passes took %.0f ms", policy.name, why, record.ops, record.casts, took
        )
        return record

    def uncast(self, gm: GraphModule, inputs: Sequence[Any], why: str) -> GraphRecord:
        """Dump Dynamo's ``gm`` for ``inputs``, which gets no casts, and return its record; it runs in float32."""
        if self.dumps and not self._captured:
            self._stages.graph("captured", lambda: list_graph(capture(gm, inputs).module, stage="captured"))
        return GraphRecord(list_graph(gm, policy="float32", chosen=why, ended=self._ended))

    def partitioned(self, stage: str, gm: GraphModule, kept: tuple[KeptValue, ...]) -> None:
        """Dump AOTAutograd's ``gm`` as the compiler gets it. ``stage``: "forward" or "backward"; ``kept``: by rules."""
        self._stages.graph(stage, lambda: list_partition(gm, stage, kept))

    def compiled(self, stage: str, compiled: object) -> None:
        """Dump the code that Inductor has made of AOTAutograd's graph of ``stage``."""
        source = getattr(compiled, "source_code", None)
        if source:
            self._stages.text(f"{stage}_kernels", lambda: source)

    def _kept_bytes(self, graph: Captured) -> int | None:
        return kept_bytes(graph.module, graph.mode) if self.dumps else None
