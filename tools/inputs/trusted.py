"""The functions that a graph's text may name: looked up in tables, never imported, never evaluated.

A dump is data and may come from anywhere. Its functions are called on FakeTensors, so everything here must be harmless
there: functions of tensors and numbers that access no files, start no processes and take no code. The lists are torch's
own where it has them: the functions that tensor subclasses can override, the operators that its dispatcher registers.
"""

import builtins
import importlib
import math
import operator
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from fxamp.graph_text.calls import OPERATORS
from fxamp.torch_private.parts.functorch import predispatch


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Modules with torch's own tensor functions; these torch._C modules contain nothing else.
_MODULES: Mapping[str, Any] = {
    "torch": torch,
    "torch._VF": torch._C._VariableFunctions,
    "torch._C._VariableFunctions": torch._C._VariableFunctions,
    "torch.functional": torch.functional,
    "torch.nn.functional": torch.nn.functional,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "torch.special": torch.special,
    "torch._C._nn": torch._C._nn,
    "torch._C._fft": torch._C._fft,  # type: ignore[attr-defined]
    "torch._C._linalg": torch._C._linalg,  # type: ignore[attr-defined]
    "torch._C._special": torch._C._special,  # type: ignore[attr-defined]
}

_NATIVE = frozenset({"torch._VF", "torch._C._VariableFunctions", "torch._C._nn", "torch._C._fft", "torch._C._linalg"})


def _transforms(path: str, module: Any) -> dict[str, Any]:
    """Return the functions that open and close torch.func's transforms."""
    ends = ("_increment_nesting", "_decrement_nesting", "_batch_dim", "wrap_for_grad", "lazy_load_decompositions")
    return {f"{path}.{name}": getattr(module, name) for name in dir(module) if name.endswith(ends)}


_SYMBOLIC = _words("tensor as_tensor sym_int sym_float sym_max sym_min sym_not sym_ite sym_sum Size")

#: torch's functions of numbers and symbols, and marks that capture keeps and never calls.
_MORE: Mapping[str, Any] = {
    "torch.amp.autocast_mode._enter_autocast": torch.amp.autocast_mode._enter_autocast,
    "torch.amp.autocast_mode._exit_autocast": torch.amp.autocast_mode._exit_autocast,
    "torch._C._set_grad_enabled": torch._C._set_grad_enabled,
    **{f"torch.{name}": getattr(torch, name) for name in _SYMBOLIC},
    **_transforms("torch._C._functorch", torch._C._functorch),
    **_transforms("torch._functorch.predispatch", predispatch),
}

_BUILTINS = ("abs", "bool", "divmod", "float", "int", "len", "max", "min", "pow", "round", "sum")

_OPERATORS = _words(
    "add sub mul truediv floordiv mod pow matmul neg pos invert not_ and_ or_ xor lshift rshift abs eq ne lt le gt ge "
    "is_ is_not getitem setitem index truth iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift "
    "irshift contains"
)

_MATH = _words("ceil cos cosh exp floor fabs isqrt log log2 log10 pow sin sinh sqrt tan tanh trunc")

#: Tensor functions with access to anything else: files, memory addresses, hooks, Python objects, other processes.
_REFUSED = _words(
    "from_file frombuffer from_numpy from_dlpack save load apply_ map_ map2_ register_hook "
    "register_post_accumulate_grad_hook backward numpy tolist data_ptr const_data_ptr share_memory_ storage "
    "untyped_storage set_ module_load record_stream pin_memory autocast compile import_ir_module fork wait print _print"
)

#: Arguments by which an operator accesses something outside the graph.
_OUTSIDE = ("filename", "file_name", "path", "file")

_REFUSED_NAMESPACES = frozenset({"debugprims", "prim", "rpc", "image"})

#: Attributes of tensors that graphs read.
ATTRIBUTES = _words(
    "T H mT mH data device dtype grad imag is_cpu is_cuda is_nested is_sparse itemsize layout nbytes ndim real "
    "requires_grad shape"
)

#: The functions that expressions stand for, by the class of their ``ast`` operator.
EXPRESSIONS: Mapping[str, Callable[..., Any]] = {kind: getattr(operator, name) for kind, name in OPERATORS.items()}


def function(path: str) -> Callable[..., Any] | None:
    """Return the function with the dotted ``path`` in a graph's text; None if it is unknown here or not allowed."""
    if path in _MORE:
        known: Callable[..., Any] = _MORE[path]
        return known
    if path.startswith("torch.ops."):
        return _operator(path.removeprefix("torch.ops.").split("."))
    owner, _, name = path.rpartition(".")
    if owner in ("operator", "_operator"):
        return getattr(operator, name) if name in _OPERATORS else None
    if owner == "math":
        return getattr(math, name) if name in _MATH else None
    if owner in ("", "builtins"):
        return getattr(builtins, name) if name in _BUILTINS else None
    if owner == "torch.Tensor":
        return getattr(torch.Tensor, name) if is_method(name) else None
    return _tensor_function(owner, name)


def constant(path: str) -> Any:
    """Return the dtype, layout or memory format that ``path`` names (``"torch.float16"``), or None."""
    owner, _, name = path.rpartition(".")
    value = getattr(torch, name, None) if owner == "torch" else None
    kinds = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme, float)
    return value if isinstance(value, kinds) else None


def is_method(name: str) -> bool:
    """Whether a graph may call the tensor method ``name``."""
    if name in _REFUSED or (name.startswith("_") and name not in _arithmetic_methods()):
        return False
    return callable(getattr(torch.Tensor, name, None))


@cache
def _arithmetic_methods() -> frozenset[str]:
    reflected = {f"__r{name.strip('_')}__" for name in _OPERATORS}
    return frozenset({f"__{name.strip('_')}__" for name in _OPERATORS} | reflected | {"__len__"})


def _tensor_function(owner: str, name: str) -> Callable[..., Any] | None:
    module = _MODULES.get(owner)
    if module is None or name in _REFUSED or name.startswith("__"):
        return None
    value: Callable[..., Any] | None = getattr(module, name, None)
    if value is None or not callable(value) or isinstance(value, type):
        return None
    native = owner in _NATIVE or hasattr(torch._C._VariableFunctions, name)
    functional = owner == "torch.nn.functional" and not name.startswith("_")
    return value if native or functional or value in _overridable() else None


@cache
def _overridable() -> frozenset[Any]:
    modules = torch.overrides.get_overridable_functions()
    return frozenset(overridable for owner in _MODULES.values() for overridable in modules.get(owner, ()))


def _operator(parts: list[str]) -> Callable[..., Any] | None:
    """Return a registered operator: ``aten.mm.default``, ``aten.mm``, ``higher_order.cond``."""
    if len(parts) not in (2, 3) or parts[0] in _REFUSED_NAMESPACES or any(part.startswith("__") for part in parts[:2]):
        return None
    if parts[0] == "prims":
        importlib.import_module("torch._inductor.inductor_prims")  # registers those of Inductor, which its graphs hold
    value: Any = torch.ops
    for part in parts:
        try:
            value = getattr(value, part)
        except (AttributeError, RuntimeError):
            return None
    if isinstance(value, HigherOrderOperator):
        return value
    if isinstance(value, OpOverloadPacket):
        names = value.overloads()  # type: ignore[no-untyped-call]
        return value if any(_harmless(getattr(value, name)) for name in names) else None
    return value if isinstance(value, OpOverload) and _harmless(value) else None


def _harmless(op: OpOverload[..., Any]) -> bool:
    """Whether the dispatcher has ``op`` (TorchScript's own operators can write files) and no argument is a file."""
    if op._opname in _REFUSED or not torch._C._dispatch_has_kernel(op.name()):  # type: ignore[no-untyped-call]
        return False
    texts = [argument.name for argument in op._schema.arguments if "str" in str(argument.type)]
    return not any(name in _OUTSIDE for name in texts)
