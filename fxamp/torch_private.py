"""All uses of torch's private interfaces that have no public replacement, for torch 2.11 to 2.15.

Each function's docstring ends with what breaks if torch changes. "Loudly" means an error from torch. Changes that would
cause no error are found by tests/test_torch_private.py, which checks each function against the installed torch.
Semi-public modules (``torch.utils._pytree``, ``torch._ops``, FakeTensorMode) are used directly where they are needed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from threading import RLock
from types import FrameType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._guards import CompileContext, TracingContext, compile_context, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx import traceback as fx_traceback
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as _optimizers
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

Node = Any
"""A node of the autograd graph; torch's own class for nodes does not cover C++ nodes."""

Mode = TypeVar("Mode")


# Autograd.


def running_node() -> Node:
    """Return the autograd node that is running in this thread; None outside a backward. Breaks loudly."""
    return torch._C._current_autograd_node()


def running_backward() -> int:
    """Return the number of the backward that is running in this thread; -1 outside a backward.

    Breaks loudly. If torch no longer counted up by one, every custom Function would be rejected as one that runs
    another backward.
    """
    return torch._C._current_graph_task_id()


def keeps_graph() -> bool:
    """Whether the running backward keeps its graph (``retain_graph``, ``create_graph``). Breaks loudly."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def is_leaf(node: Node) -> bool:
    """Whether ``node`` accumulates into the ``.grad`` of a tensor. Breaks loudly."""
    return isinstance(node, torch._C._functions.AccumulateGrad)  # type: ignore[attr-defined]


def gradient_dtypes(node: Node) -> list[torch.dtype]:
    """Return the dtypes of the gradients that enter ``node``. Breaks loudly."""
    return [each.dtype for each in node._input_metadata]


def function_of(node: Node) -> Any:
    """Return the ``torch.autograd.Function`` whose backward ``node`` runs; None for an operator of torch.

    If torch renames ``_forward_cls``, fxamp recognises none of its own nodes: their backwards raise if a hook was set
    on them, and no gradient has a known owner such as a DTensor.
    """
    return getattr(type(node), "_forward_cls", None)


def autocast_dtype_of(node: Node) -> torch.dtype | None:
    """Return the dtype of the autocast under which a Function's ``node`` ran its forward (``custom_fwd``), or None.

    If torch renames the attributes, a Function that computes in float16 between wider gradients is not scaled.
    """
    return getattr(node, "_dtype", None) if getattr(node, "_fwd_used_autocast", False) else None


# AOTAutograd.


def graph_metadata(function: Any) -> list[Any]:
    """Return AOTAutograd's metadata of a compiled graph; with tensor subclasses also that of the plain graph inside.

    ``function``: from :func:`function_of`. If torch renames the attributes, fxamp does not recognise its graphs in the
    autograd graph; they raise once hooks were set on them.
    """
    return [getattr(function, "metadata", None), getattr(subclass_metadata(function), "fw_metadata", None)]


def subclass_metadata(function: Any) -> Any:
    """Return AOTAutograd's metadata about tensor subclasses among a graph's inputs; None if there are none.

    If torch renames it, no gradient of a wrapper such as DTensor has an owner: its flags count for every optimizer.
    """
    return getattr(function, "maybe_subclass_metadata", None)


def compiled_by_aot(function: Any) -> bool:
    """Whether ``function``, from :func:`function_of`, is a graph that AOTAutograd compiled.

    If torch renames ``compiled_bw``, other compilers' graphs are treated as user-written Functions, and get more hooks
    than needed.
    """
    return hasattr(function, "compiled_bw")


def current_metadata() -> Any:
    """Return AOTAutograd's metadata of the forward that it is compiling; None outside a compilation.

    If torch moves it, fxamp does not recognise its graphs in the autograd graph, see :func:`graph_metadata`.
    """
    context = TracingContext.try_get()
    return None if context is None else context.fw_metadata


def compiling_again() -> Callable[[], AbstractContextManager[None]]:
    """Return a function that restores AOTAutograd's current compile contexts, for a graph that is compiled later.

    Breaks loudly. If torch adds other contexts, its logs of the later compilation lack their information.
    """
    noted, compilation = TracingContext.try_get(), CompileContext.try_get()

    @contextmanager
    def again() -> Iterator[None]:
        with tracing(noted), compile_context(compilation), without_autocast():
            yield

    return again


def keep_saved_tensors() -> None:
    """Forbid the kernels of the graph that AOTAutograd is compiling to overwrite tensors that the forward saved.

    So ``retain_graph=True`` works as in eager mode. torch reads this list, also at run time. Its config switch leaves
    None there, which torch treats as a non-empty list. If torch renames the list, ``retain_graph=True`` raises an error
    from torch.
    """
    metadata = current_metadata()
    if metadata is not None:
        metadata.bw_donated_idxs = []


@contextmanager
def running_metadata() -> Iterator[None]:
    """Make AOTAutograd's metadata of the backward that is running the current metadata inside.

    As it would be if the backward were compiled with its forward. Breaks loudly.
    """
    context = TracingContext.try_get()
    metadata = [each for each in graph_metadata(function_of(running_node())) if each is not None]
    if context is None or not metadata:
        yield
        return
    before, context.fw_metadata = context.fw_metadata, metadata[-1]
    try:
        yield
    finally:
        context.fw_metadata = before


def donated_inputs() -> list[int] | None:
    """Return which tensors that the forward saved the kernels of the current graph's backward may overwrite.

    Inductor compiles for this, and leaves it out of its cache's keys. If torch renames it, a backward that may
    overwrite some can be taken from the cache where it may not, as torch's own.
    """
    return getattr(current_metadata(), "bw_donated_idxs", None)


def keep_if_retained(node: Node) -> None:
    """If the first backward of the graph of ``node`` keeps the graph, forbid its kernels what they otherwise may.

    As :func:`keep_saved_tensors`, for a backward that AOTAutograd does not compile when it first runs.
    """
    for metadata in graph_metadata(function_of(node)):
        if metadata is not None and not getattr(metadata, "fxamp_has_run", False):
            metadata.fxamp_has_run = True
            if keeps_graph():
                metadata.bw_donated_idxs = []


def stores_backwards() -> bool:
    """Whether AOTAutograd's cache is on and can store a backward of fxamp's making.

    If torch renames what it takes, graphs with a scaler, several results, or rules for the backward are traced again
    in each process.
    """
    try:
        from torch._functorch import config
        from torch._functorch._aot_autograd.aot_autograd_result import BundledOutputCodeLoadable
        from torch._functorch._aot_autograd.autograd_cache import check_cacheable, should_use_local_autograd_cache
        from torch.fx._graph_pickler import GraphPickler
    except ImportError:
        return False
    context = TracingContext.try_get()
    if context is not None and context.ddp_optimizer_ctx is not None:  # it counts the backwards that are compiled late
        return False
    known = hasattr(config, "bundled_autograd_cache") and hasattr(config, "force_non_lazy_backward_lowering")
    takes = all(map(callable, (BundledOutputCodeLoadable, check_cacheable, GraphPickler)))
    return known and takes and should_use_local_autograd_cache() and not config.bundled_autograd_cache


def is_cacheable(gm: GraphModule) -> bool:
    """Whether AOTAutograd's cache takes graphs with the calls of ``gm``; call it where :func:`stores_backwards`."""
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache, check_cacheable

    try:
        check_cacheable(gm)
    except BypassAOTAutogradCache:
        return False
    return True


@contextmanager
def storing_backwards() -> Iterator[None]:
    """Let AOTAutograd's cache store what compilers return, and hand backwards to their compiler at once.

    Breaks loudly.
    """
    from torch._functorch import config

    with config.patch(bundled_autograd_cache=True, force_non_lazy_backward_lowering=True):
        yield


def uncacheable(why: str) -> Exception:
    """Return the error with which AOTAutograd's cache leaves a graph out. Breaks loudly."""
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

    return BypassAOTAutogradCache(why)


#: Keys of ``node.meta`` that hold objects of the process.
_NOT_STORED = frozenset(("source_fn_stack", "fwd_source_fn_stack", "from_node", "torch_fn", "grapharg", "tensor_dict"))


def dump_graph(gm: GraphModule, inputs: Sequence[Any]) -> bytes:
    """Return ``gm`` with the values and annotations of its nodes, and its fake ``inputs``, as bytes.

    Module classes become their names. Raises ValueError if a size is dynamic: what loads it would change the sizes of
    the process; and whatever pickle does if something cannot be stored. Breaks loudly.
    """
    from torch.fx._graph_pickler import GraphPickler, Options

    stored = deepcopy(gm)
    values = [*inputs, *(node.meta.get("val") for node in stored.graph.nodes)]
    if any(map(is_dynamic, tree_leaves(values))):
        raise ValueError("it has dynamic sizes")
    for node in stored.graph.nodes:
        for key in ("nn_module_stack", "fwd_nn_module_stack"):
            stack = node.meta.get(key)
            if stack:
                node.meta[key] = {at: (path, _qualified(kind)) for at, (path, kind) in stack.items()}
    options = Options(ops_filter=None, node_metadata_key_filter=lambda key: key not in _NOT_STORED)
    return GraphPickler.dumps((stored, list(inputs), _text(stored)), options)


def load_graph(stored: bytes, mode: FakeTensorMode) -> tuple[GraphModule, list[Any]]:
    """Return what :func:`dump_graph` stored, with values of ``mode``. Raises ValueError if it is not as it was."""
    from torch.fx._graph_pickler import GraphPickler

    gm, inputs, text = cast(tuple[GraphModule, list[Any], str], GraphPickler.loads(stored, mode))
    gm.recompile()
    if _text(gm) != text:
        raise ValueError("a stored graph was not restored as it was")
    return gm, inputs


def _qualified(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)


def is_dynamic(value: object) -> bool:
    """Whether ``value`` is a symbolic number, or a tensor with a symbolic size. Breaks loudly."""
    if isinstance(value, Tensor):
        return not all(type(size) is int for size in (*value.shape, *value.stride(), value.storage_offset()))
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _text(gm: GraphModule) -> str:
    """Return the code of ``gm``, and of graphs inside it, with dtype, shape, strides and device of each value."""
    parts = [part for part in gm.modules() if isinstance(part, GraphModule)]
    values = [(n.name, tree_leaves(n.meta.get("val"))) for part in parts for n in part.graph.nodes]
    layouts = [(n, [(v.dtype, v.shape, v.stride(), v.device) for v in vs if isinstance(v, Tensor)]) for n, vs in values]
    return repr(([part.code for part in parts], layouts))


# Tracing.


def replace_tracing_mode(kind: type[Mode]) -> Mode:
    """Return the tracing mode of the running make_fx call as ``kind``, a subclass of its class without fields.

    make_fx creates its mode itself and accepts no other, so the mode's class is replaced. Breaks loudly: with TypeError
    if the mode's memory layout changes, with AttributeError if torch moves it.
    """
    modes: Any = torch._ops
    mode: Any = modes._get_dispatch_mode_pre_dispatch(torch._C._TorchDispatchModeKey.PROXY)
    mode.__class__ = kind
    own: Mode = mode
    return own


@contextmanager
def computed_again() -> Iterator[None]:
    """Mark ops that AOTAutograd traces inside for recomputation in the backward, so that their results are not kept.

    Marks that a checkpoint has set do not change. If torch changes the marks, the backward may keep the results.
    """
    meta: dict[str, Any] = fx_traceback.get_current_meta()
    marks = {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": 0}
    if not fx_traceback.has_preserved_node_meta() or meta.keys() & marks.keys():
        yield
        return
    meta.update(marks)
    try:
        yield
    finally:
        for key in marks:
            meta.pop(key, None)


#: The flag is process-wide: while one thread has set it, no other thread may read its previous value.
_compiling = RLock()


@contextmanager
def compiling_flag() -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` true inside, in every thread; only one thread at a time can be inside.

    So torch's optimizers take the path that reads no value on the host. If torch renames the flag, they read values of
    fake tensors, and their steps are left to the host.
    """
    with _compiling:
        before = torch.compiler._is_compiling_flag
        torch.compiler._is_compiling_flag = True
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag = before


def without_autocast() -> AbstractContextManager[Any]:
    """Disable autocast for every device inside; restore it on exit. Breaks loudly."""
    return torch._C._DisableAutocast()


def without_saved_tensors_hooks() -> AbstractContextManager[None]:
    """Hide tensors saved inside from the program's ``torch.autograd.graph.saved_tensors_hooks``. Breaks loudly."""
    from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing

    context: AbstractContextManager[None] = _disable_saved_tensors_hooks_during_tracing()
    return context


# Dynamo.


def raised_through_dynamo(error: Exception, backend: Callable[..., Any], frame: FrameType | None) -> Exception:
    """Return ``error`` in a form that Dynamo raises unchanged: of its own type, and of BackendCompilerFailed.

    Its traceback starts at ``frame``, and the message is its last line. If Dynamo no longer passes
    BackendCompilerFailed through, the message is wrapped in another error.
    """
    from torch._dynamo.exc import BackendCompilerFailed

    kind, message = type(error), str(error)

    def begin(raised: Any) -> None:
        BackendCompilerFailed.__init__(raised, backend, error, frame)

    members = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__str__": lambda _: message}
    raised: Exception = type(kind.__name__, (kind, BackendCompilerFailed), members | {"__init__": begin})()
    return raised


def hint(number: int | torch.SymInt) -> int | None:
    """Return ``number`` for the sizes at compile time, without a guard on them; None if it depends on tensor values.

    If torch renames the hint of a symbolic number, dynamic sizes count as unknown.
    """
    if isinstance(number, int):
        return number
    found = getattr(number.node, "hint", None)
    return found if isinstance(found, int) else None


def guard_current_graph(name: str, holds: Callable[[], bool]) -> None:
    """Recompile the graph that Dynamo is compiling once ``holds`` is false; each call of the graph calls ``holds``.

    ``name``: the name of ``holds`` in Dynamo's messages. Does nothing outside torch.compile. Breaks loudly.
    """
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import GlobalStateSource
    from torch._guards import Guard, GuardBuilderBase

    context = TracingContext.try_get()
    if context is None:
        return

    def create(builder: GuardBuilderBase, guard: Guard) -> None:
        assert isinstance(builder, GuardBuilder)
        code = [f"{name}()"]
        builder.add_python_lambda_leaf_guard_to_root(code, code, closure_vars={name: holds}, is_epilogue=False)

    context.guards_context.dynamo_guards.add(Guard(GlobalStateSource(), create))


def backend_of(compiled: Any) -> Any:
    """Return the backend function that ``compiled`` was compiled with; None if torch.compile did not return it.

    If torch moves it, there is no warning that a compiled model runs no graph.
    """
    names = getattr(getattr(compiled, "__code__", None), "co_freevars", ())
    context = compiled.__closure__[names.index("self")].cell_contents if "self" in names else compiled
    callback: Any = getattr(getattr(context, "dynamo_ctx", context), "callback", None)
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return getattr(callback, "compiler_fn", None)


# Optimizers and wrappers.


def step_pre_hooks(optimizer: torch.optim.Optimizer) -> Sequence[Callable[..., Any]]:
    """Return the hooks that run before a step, in order: those of all optimizers, then this one's. Breaks loudly."""
    hooks = _optimizers._global_optimizer_pre_hooks, optimizer._optimizer_step_pre_hooks
    return [hook for each in hooks for hook in each.values()]


def step_post_hooks(optimizer: torch.optim.Optimizer) -> Sequence[Callable[..., Any]]:
    """Return the hooks that run after a step, in order: this optimizer's, then those of all. Breaks loudly."""
    hooks = optimizer._optimizer_step_post_hooks, _optimizers._global_optimizer_post_hooks
    return [hook for each in hooks for hook in each.values()]


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning-rate schedulers that the optimizer has stepped; if torch renames it, they warn of a wrong order."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def running_wrapper() -> DistributedDataParallel | None:
    """Return the wrapper whose forward is running; torch stores it for its own compiler. Breaks loudly."""
    wrapper: DistributedDataParallel | None = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    return wrapper
