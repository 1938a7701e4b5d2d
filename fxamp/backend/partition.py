"""Build the listing of one of AOTAutograd's partitioned graphs, with the bytes that the forward keeps."""

from typing import Any, TypeGuard

from torch import Tensor
from torch.fx import GraphModule, Node

from fxamp.graph import graph_output
from fxamp.listing import Listing
from fxamp.pipeline.list_graph import list_graph
from fxamp.torch_private import current_metadata


def list_partition(gm: GraphModule, stage: str) -> Listing:
    """Return the listing of ``gm``; ``stage`` is "forward" or "backward"."""
    return list_graph(gm, stage=stage, kept_after=_kept(gm) if stage == "forward" else None)


def _kept(gm: GraphModule) -> int | None:
    """Return the bytes that the forward returns for the backward besides its results; inputs do not count."""
    metadata = current_metadata()
    if metadata is None:
        return None
    returned: Any = graph_output(gm.graph).args[0]
    saved = (node.meta.get("val") for node in returned[metadata.num_forward_returns :] if _computed(node))
    storages = [value.untyped_storage() for value in saved if isinstance(value, Tensor)]
    sizes = {storage._cdata: storage.nbytes() for storage in storages}
    return sum(sizes.values()) if all(isinstance(size, int) for size in sizes.values()) else None


def _computed(node: Any) -> TypeGuard[Node]:
    return isinstance(node, Node) and node.op != "placeholder"
