"""Helpers for torch.fx nodes and graphs, shared by capture and passes."""

from fxamp.graph.aliases import AliasSets, writes
from fxamp.graph.arguments import argument, arguments, set_argument
from fxamp.graph.layouts import dense_order, expanded_order, has_strides, same_shape, same_strides
from fxamp.graph.nodes import (
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    all_graphs,
    all_nodes,
    attribute,
    base_name,
    dtype_of,
    fake_tensors,
    first_computation,
    floating_inputs,
    graph_output,
    hold,
    inherit_provenance,
    is_answered,
    is_composite,
    is_custom,
    is_float_tensor,
    is_mutable,
    is_pure,
    is_random,
    need_gradients,
    nesting_change,
    nodes_with_gradients,
    op_name,
    register,
    returned,
    strip_values,
    subgraphs,
    tensor_stores,
    tensor_value,
)
from fxamp.graph.printing import dtype_name, format_graph
from fxamp.graph.source import SourceFrame, describe_source, module_classes, module_path, source_frames
from fxamp.graph.tensor_wrappers import fake_mode_of, follows_input, inner_tensors, is_data, is_wrapper, mode_of
from fxamp.graph.verify import verify
from fxamp.graph.writer import INSERTED, GraphWriter, computed, recompute
