"""The partitioner object that applies rules for kept values under Inductor. Imports Inductor."""

from collections.abc import Sequence
from typing import Any

from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch.fx import GraphModule

from fxamp.backend.kept_rules import KeptRules
from fxamp.passes.partition import pack_kept, unpack_kept
from fxamp.passes.shared import packing, saved_values


class KeptPartitioner(CustomPartitionerFn):
    """A partitioner in the form that Inductor expects; Inductor's caches identify it by :meth:`uuid`."""

    def __init__(self, rules: KeptRules) -> None:
        self._rules = rules

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        return self._rules.partition(gm, joint_inputs, strides=False, **kwargs)

    def uuid(self) -> str:
        """Return an id of everything that affects the result: the policy, and the code that packs."""
        files = tuple(str(module.__file__) for module in (packing, saved_values, pack_kept, unpack_kept))
        return f"fxamp {self._rules.policy.digest} {get_hash_for_files(files)!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "KeptPartitioner":
        """Return self: Inductor copies its settings, but fxamp must see what gets compiled."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the id alone: torch's caches pickle their settings to make keys, and load none of them."""
        return str, (self.uuid(),)
