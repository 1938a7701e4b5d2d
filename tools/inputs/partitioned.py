"""What a compiled graph saves for its backward: AOTAutograd partitions it on FakeTensors, and nothing runs."""

import importlib
from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from fxamp.backend.keep_rules import KeepRules
from fxamp.backend.participants import saving_overwritten
from fxamp.capture.fakes import fake_inputs
from fxamp.graph import strip_values
from fxamp.graph_text import KeptValue
from fxamp.passes.partition.pack_kept import kept_as_they_are
from fxamp.pipeline.participant import boxed
from fxamp.policy import Policy
from fxamp.policy.model.site import KEPT
from fxamp.torch_private import without_autocast


def kept_values(gm: GraphModule, inputs: Sequence[Any], policy: Policy) -> tuple[KeptValue, ...]:
    """Return what the forward of ``gm``, which has the casts of ``policy``, keeps for its backward.

    ``inputs`` are those of ``gm``. The result is empty if no input needs a gradient. Ops are decomposed as for
    Inductor, which compiles by default, and its partitioner chooses; ``gm`` loses its values.
    """
    from fxamp.torch_private.parts.dynamo import common as dynamo_backends
    from fxamp.torch_private.parts.functorch import partitioners
    from fxamp.torch_private.parts.inductor import select_decomp_table

    importlib.import_module("torch._inductor.lowering")  # decompositions of pooling expect it to be there

    decompositions = select_decomp_table()
    rules, values = KeepRules(policy, inspected=True), list[KeptValue]()

    def partition(joint: GraphModule, inputs: Sequence[Any], **more: Any) -> tuple[GraphModule, GraphModule]:
        more = {**more, "compiler": "inductor"}
        if policy.has_rules_for(KEPT):
            pair = rules.partition(partitioners.min_cut_rematerialization_partition, "aot_eager")(joint, inputs, **more)
            values.extend(rules.kept)
        else:
            pair = partitioners.min_cut_rematerialization_partition(joint, inputs, **more)
            values.extend(kept_as_they_are(pair[0], more["num_fwd_outputs"]))
        return pair

    def compiler(graph: GraphModule, examples: Sequence[Any]) -> Any:
        return boxed(graph)

    strip_values(gm)
    with without_autocast():
        lowered = dynamo_backends.aot_autograd(
            fw_compiler=compiler,
            bw_compiler=compiler,
            partition_fn=saving_overwritten(partition),
            decompositions=decompositions,
        )
        lowered(gm, fake_inputs(inputs)[0])
    return tuple(values)
