"""Rules for what is kept, as Inductor takes them: a partitioner. Imports Inductor."""

from collections.abc import Sequence
from typing import Any

from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch.fx import GraphModule

from fxamp.backend.kept_rules import KeptRules
from fxamp.passes.partition import pack_kept, unpack_kept
from fxamp.passes.shared import packing, saved_values


class KeptPartitioner(CustomPartitionerFn):
    """The partitioner of ``rules`` as Inductor takes it; Inductor's caches tell it from others by :meth:`uuid`."""

    def __init__(self, rules: KeptRules) -> None:
        self._rules = rules

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        return self._rules.partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        """What decides the outcome: the policy, and the code that packs."""
        files = tuple(str(module.__file__) for module in (packing, saved_values, pack_kept, unpack_kept))
        return f"fxamp {self._rules.policy.digest} {get_hash_for_files(files)!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "KeptPartitioner":
        """Itself: Inductor copies its settings, and what it compiles is to be noted here."""
        return self
