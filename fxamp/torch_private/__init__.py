"""All uses of torch's private interfaces that have no public replacement, for torch 2.11 to 2.15.

``parts/`` holds what is used without a function around it. Each function's docstring ends with what breaks if torch
changes. "Loudly" means an error from torch. Changes that would cause no error are found by tests/torch_private, which
checks each function, and each private name that fxamp reads, against the installed torch.
"""

from fxamp.torch_private.aot import (
    compiled_by_aot,
    compiling_again,
    computed_again,
    current_metadata,
    donated_inputs,
    forward_results,
    graph_metadata,
    is_kept_exactly,
    keep_saved_tensors,
    kept_exactly,
    overwriting_saved,
    owner_of_gradient,
    running_metadata,
    subclass_metadata,
    written_input,
)
from fxamp.torch_private.autograd import (
    Node,
    accumulates,
    after_backward,
    autocast_dtype_of,
    calling_saved_tensors_hooks,
    function_of,
    grad_fn,
    gradient_dtypes,
    inlines_saved_tensors_hooks,
    inner_nodes,
    is_leaf,
    keeps_graph,
    made_before,
    running_backward,
    running_node,
    without_saved_tensors_hooks,
)
from fxamp.torch_private.cache import is_cacheable, of_this_process, stores_backwards, storing_backwards, uncacheable
from fxamp.torch_private.compiled_autograd import refuse_compiled_autograd_of
from fxamp.torch_private.distributed_wrappers import running_wrapper, summed_in
from fxamp.torch_private.dynamo import (
    adopt_sources,
    backend_of,
    backends_of_compiles,
    called_by_backward,
    caller_inside,
    compile_options,
    compiled_code,
    compiles_backward,
    compiling_frame,
    context_of,
    guard_current_graph,
    hint,
    inputs_cast_by_caller,
    is_custom_fwd,
    on_each_compilation,
    raised_through_dynamo,
    source_text,
    traced,
    untraced,
    why_skipped,
)
from fxamp.torch_private.export import lost_changes, raising_lost_changes, returning_nothing
from fxamp.torch_private.inductor import (
    calls_kernel,
    compiled_function,
    drop_outputs,
    order_writes,
    overwritten_buffers,
    realize_inputs_of,
)
from fxamp.torch_private.mkl import has_wide_products, write_wide_product
from fxamp.torch_private.op_names import has_autocast_kernel, operator_names
from fxamp.torch_private.optimizers import is_initialized, note_step, step_post_hooks, step_pre_hooks
from fxamp.torch_private.recompiles import RecompileLimit, on_each_call, on_recompile_limit
from fxamp.torch_private.stored_graphs import dump_graph, is_dynamic, load_graph
from fxamp.torch_private.symbols import (
    drop_guards_on_ragged_sizes,
    dropped_sizes,
    rebind_sizes,
    size_oblivious,
    size_reader,
    size_tables,
)
from fxamp.torch_private.tensors import (
    comparison_with,
    onednn_computes,
    outside_transforms,
    real_object,
    set_version,
    transforms_closed,
)
from fxamp.torch_private.tracing import (
    compile_lock,
    compiled_as_written,
    compiling_flag,
    make_fx,
    replace_tracing_mode,
    without_autocast,
    without_fake_mode,
)
