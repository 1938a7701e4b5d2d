"""Small helpers over torch.fx nodes, shared by capture and passes."""

from fxamp.graph.aliases import AliasSets
from fxamp.graph.nodes import (
    fake_tensors,
    floating_inputs,
    graph_output,
    is_composite,
    is_float_tensor,
    nesting_change,
    op_name,
    subgraphs,
    tensor_value,
    writes,
)
from fxamp.graph.printing import dtype_name, format_graph
from fxamp.graph.source import SourceFrame, describe_source, module_path, source_frames
from fxamp.graph.verify import verify

__all__ = [
    "AliasSets",
    "SourceFrame",
    "describe_source",
    "dtype_name",
    "fake_tensors",
    "floating_inputs",
    "format_graph",
    "graph_output",
    "is_composite",
    "is_float_tensor",
    "module_path",
    "nesting_change",
    "op_name",
    "source_frames",
    "subgraphs",
    "tensor_value",
    "verify",
    "writes",
]
