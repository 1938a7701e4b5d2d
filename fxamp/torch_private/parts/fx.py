"""Parts of torch.fx, its traces and fake tensors."""

from torch._dispatch.python import enable_python_dispatcher
from torch._functorch.compile_utils import fx_graph_cse
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._logging._internal import trace_structured_artifact
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    disable_proxy_modes_tracing,
    get_proxy_slot,
    py_sym_types,
    set_proxy_slot,
    track_tensor_tree,
)
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY as COPIED_ATTRIBUTES
from torch.fx.node import _get_qualified_name
from torch.utils._dtype_abbrs import dtype_abbrs
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass
