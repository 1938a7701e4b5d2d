"""Build the listing of one of AOTAutograd's partitioned graphs, with what the forward keeps for the backward."""

from torch.fx import GraphModule

from fxamp.graph import graph_output
from fxamp.listing import KeptValue, Listing
from fxamp.listing.kept import totals_of
from fxamp.passes.partition.pack_kept import KEPT_VALUES, kept_as_they_are
from fxamp.reports.list_graph import list_graph
from fxamp.torch_private import current_metadata


def list_partition(gm: GraphModule, stage: str, kept: tuple[KeptValue, ...] = ()) -> Listing:
    """Return the listing of ``gm``; ``stage`` is "forward" or "backward", ``kept`` what rules made of kept values."""
    if stage != "forward":
        return list_graph(gm, stage=stage)
    metadata, ruled = current_metadata(), bool(kept)
    if KEPT_VALUES not in graph_output(gm.graph).meta and metadata is not None:
        kept = kept_as_they_are(gm, metadata.num_forward_returns)
    before, after = totals_of(kept) if kept or metadata is not None else (None, None)
    return list_graph(gm, stage=stage, kept=kept, kept_before=before if ruled else None, kept_after=after)
