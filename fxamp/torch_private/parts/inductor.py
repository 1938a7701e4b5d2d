"""Parts of Inductor, which this imports, with its compiler."""

from torch._inductor import compile_fx, inductor_prims
from torch._inductor.async_compile import shutdown_compile_workers
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InductorError, InvalidCxxCompiler
from torch._inductor.graph import GraphLowering
from torch._inductor.memory import compute_memory_timeline, prepare_planning_info
from torch._inductor.output_code import OutputCode
from torch._inductor.utils import BoxedBool
from torch.utils import _triton
