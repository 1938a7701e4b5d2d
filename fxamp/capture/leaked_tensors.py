"""Check that a captured graph holds no tensor of the capture: such a tensor must never reach the user.

A call that the tracer cannot follow returns a FakeTensor that no node computes; a later call would then read it as a
constant. A graph may hold the tensors of the module that was captured, and real constants that the program wrote
(``torch.tensor([1, 2])``), which it copies at each call.
"""

import torch
from torch.fx import GraphModule

from fxamp.errors import CaptureError
from fxamp.graph import all_graphs, attribute, describe_source, fake_mode_of, op_name, tensor_stores
from fxamp.graph.submodules import submodules

_COPIES = frozenset({torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default})


def require_own_tensors(traced: GraphModule, source: GraphModule) -> None:
    """Raise CaptureError if ``traced`` holds a tensor that belongs neither to ``source`` nor to the program.

    ``traced`` was captured from ``source``. The message names the first call that reads the tensor.
    """
    own = {id(value) for _, module in submodules(source) for store in tensor_stores(module) for value in store.values()}
    for node in (node for graph in all_graphs(traced) for node in graph.graph.find_nodes(op="get_attr")):
        assert node.graph.owning_module is not None
        value = attribute(node.graph.owning_module, str(node.target))
        if not isinstance(value, torch.Tensor) or id(value) in own:
            continue
        user = next(iter(node.users), node)
        if fake_mode_of(value) is not None or any(reader.target not in _COPIES for reader in node.users):
            raise CaptureError(
                f"{op_name(user)} at {describe_source(user)} reads a tensor that fxamp could not follow; accepted: "
                "torch.compiler.disable or torch._dynamo.graph_break() around the code that makes it"
            )
