"""Parts of Dynamo, which this imports."""

from torch._dynamo import device_interface
from torch._dynamo.backends import common
from torch._dynamo.exc import TorchRuntimeError
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX as RESUMED
from torch._dynamo.source import ConstantSource
from torch._dynamo.utils import counters
