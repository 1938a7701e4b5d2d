"""Runs one call through ``fxamp.rewrite`` and reads off the graph which dtypes reach the op, and which come out."""

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map

import fxamp
from fxamp.errors import BannedOpError, CaptureError
from fxamp.policy import Policy
from oracle.dtypes import input_dtypes, output_dtypes
from oracle.observe import Observation, dtype_argument


def rewritten(policy: Policy, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Observation:
    """Return what the rewritten graph of a call on FakeTensors does; one that cannot be captured has a kernel_error."""
    module, inputs = one_call(op, args, kwargs)
    try:
        after = fxamp.rewrite(module, inputs, policy=policy)
    except BannedOpError as refusal:
        return Observation(refused=refusal)
    except CaptureError as error:
        return Observation(kernel_error=error)
    return read(after, op)


def one_call(
    op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[GraphModule, list[torch.Tensor]]:
    """Return a graph with one call of ``op`` and the tensors that are its inputs."""
    graph = Graph()
    inputs: list[torch.Tensor] = []

    def placeholder(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        inputs.append(value)
        return graph.placeholder(f"input_{len(inputs)}")

    args, kwargs = tree_map(placeholder, (args, dict(kwargs)))
    graph.output((graph.call_function(op, args, kwargs),))
    return GraphModule(torch.nn.Module(), graph), inputs


def read(module: GraphModule, op: OpOverload) -> Observation:
    """Return the dtypes at the one call of ``op``, or of an overload of it, in a graph with values."""
    calls = [node for node in module.graph.nodes if _packet(node) is op.overloadpacket]
    if len(calls) != 1:
        raise AssertionError(f"{len(calls)} calls of {op} in\n{module.graph}")
    args, kwargs = tree_map(_value, (calls[0].args, calls[0].kwargs))
    [output] = module.graph.find_nodes(op="output")
    return Observation(
        executed=str(calls[0].target),
        inputs=input_dtypes(args, kwargs),
        dtype=dtype_argument(calls[0].target, args, kwargs),
        outputs=output_dtypes(tree_map(_value, output.args)),
    )


def _packet(node: Node) -> Any:
    return node.target.overloadpacket if isinstance(node.target, OpOverload) else None


def _value(value: Any) -> Any:
    return value.meta["val"] if isinstance(value, Node) else value
