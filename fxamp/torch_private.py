"""What fxamp needs of torch's insides and no public function gives: all of it here, for torch 2.11 to 2.15.

Each function ends with what breaks when torch changes. "Loudly" means an error in torch's own words. What would change
quietly, tests/test_torch_private.py finds: it holds each function against the installed torch.
Semi-public modules (``torch.utils._pytree``, ``torch._ops``, FakeTensorMode) are used where they are needed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import RLock
from types import FrameType
from typing import Any, TypeVar

import torch
from torch._guards import CompileContext, TracingContext, compile_context, tracing
from torch.fx import traceback as fx_traceback
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as _optimizers
from torch.utils.checkpoint import CheckpointPolicy

Node = Any
"""A node of autograd's graph; torch's own class for them describes no C++ node."""

Mode = TypeVar("Mode")


# Autograd.


def running_node() -> Node:
    """The autograd node that is being run in this thread; None outside a backward. Breaks loudly."""
    return torch._C._current_autograd_node()


def running_backward() -> int:
    """The number of the backward that is being run in this thread; -1 outside of one.

    Breaks loudly; if torch no longer counted up by one, every custom Function would be refused as one that runs a
    backward of its own.
    """
    return torch._C._current_graph_task_id()


def keeps_graph() -> bool:
    """Whether the running backward keeps its graph (``retain_graph``, ``create_graph``). Breaks loudly."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def is_leaf(node: Node) -> bool:
    """Whether gradients end at ``node``, in the ``.grad`` of a tensor. Breaks loudly."""
    return isinstance(node, torch._C._functions.AccumulateGrad)  # type: ignore[attr-defined]


def gradient_dtypes(node: Node) -> list[torch.dtype]:
    """The dtypes of the gradients that enter ``node``. Breaks loudly."""
    return [each.dtype for each in node._input_metadata]


def function_of(node: Node) -> Any:
    """The ``torch.autograd.Function`` whose backward ``node`` runs; None for an operator of torch's own.

    If torch renames ``_forward_cls``, no node is fxamp's: their backwards raise where a hook was set on them, and
    gradients of no graph are known to belong to a wrapper such as DTensor.
    """
    return getattr(type(node), "_forward_cls", None)


def autocast_dtype_of(node: Node) -> torch.dtype | None:
    """The dtype of the autocast that the forward of a Function's ``node`` ran under (``custom_fwd``); None without one.

    If torch renames the attributes, a Function that computes in float16 between wider gradients is not scaled.
    """
    return getattr(node, "_dtype", None) if getattr(node, "_fwd_used_autocast", False) else None


# AOTAutograd.


def graph_metadata(function: Any) -> list[Any]:
    """AOTAutograd's metadata of a compiled graph, and of the plain graph within where there are tensor subclasses.

    ``function``: of :func:`function_of`. If torch renames them, fxamp's graphs are unknown in autograd's graph, and
    refuse to run once they were hooked.
    """
    return [getattr(function, "metadata", None), getattr(subclass_metadata(function), "fw_metadata", None)]


def subclass_metadata(function: Any) -> Any:
    """What AOTAutograd notes of tensor subclasses among a graph's inputs; None without any.

    If torch renames it, no gradient of a wrapper such as DTensor has an owner: its flags count for every optimizer.
    """
    return getattr(function, "maybe_subclass_metadata", None)


def compiled_by_aot(function: Any) -> bool:
    """Whether ``function``, of :func:`function_of`, is a graph that AOTAutograd compiled.

    If torch renames ``compiled_bw``, other compilers' graphs are taken for Functions written by hand, and hooked more
    than needed.
    """
    return hasattr(function, "compiled_bw")


def current_metadata() -> Any:
    """AOTAutograd's metadata of the forward that it compiles now; None outside of it.

    If torch keeps it elsewhere, fxamp's graphs are unknown in autograd's graph, see :func:`graph_metadata`.
    """
    context = TracingContext.try_get()
    return None if context is None else context.fw_metadata


def compiling_again() -> Callable[[], AbstractContextManager[None]]:
    """What gives the contexts back in which AOTAutograd compiles now, for a graph that is compiled later.

    Breaks loudly; if torch notes more in contexts of its own, its logs of the later compilation lack that.
    """
    noted, compilation = TracingContext.try_get(), CompileContext.try_get()

    @contextmanager
    def again() -> Iterator[None]:
        with tracing(noted), compile_context(compilation), without_autocast():
            yield

    return again


def keep_saved_tensors() -> None:
    """Let no kernel of the graph that AOTAutograd compiles now write over what the forward saved.

    So ``retain_graph=True`` works as in eager mode. torch decides by this list, at run time too; its config switch
    leaves None there, which it takes for a list that is not empty. If torch renames the list, ``retain_graph=True``
    raises in torch's own words.
    """
    metadata = current_metadata()
    if metadata is not None:
        metadata.bw_donated_idxs = []


# Tracing.


def replace_tracing_mode(kind: type[Mode]) -> Mode:
    """The tracing mode of the make_fx call that is running, as ``kind``, a subclass of its class without fields.

    make_fx makes its mode itself and takes no other, so the mode's class is replaced. Breaks loudly: with TypeError if
    the mode's memory layout changes, with AttributeError if it is kept elsewhere.
    """
    modes: Any = torch._ops
    mode: Any = modes._get_dispatch_mode_pre_dispatch(torch._C._TorchDispatchModeKey.PROXY)
    mode.__class__ = kind
    own: Mode = mode
    return own


@contextmanager
def computed_again() -> Iterator[None]:
    """What AOTAutograd traces inside, the backward computes again if it needs it, instead of keeping it.

    What a checkpoint has marked already stays as it is. If torch marks it otherwise, the backward may keep it.
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


#: The flag is the process's, so while one thread has set it no other may note what it was.
_compiling = RLock()


@contextmanager
def compiling_flag() -> Iterator[None]:
    """``torch.compiler.is_compiling()`` is true inside, in every thread; one thread at a time is inside.

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
    """Autocast is off inside for every device, and as it was on leaving. Breaks loudly."""
    return torch._C._DisableAutocast()


def without_saved_tensors_hooks() -> AbstractContextManager[None]:
    """``torch.autograd.graph.saved_tensors_hooks`` of the program see nothing that is saved inside. Breaks loudly."""
    from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing

    context: AbstractContextManager[None] = _disable_saved_tensors_hooks_during_tracing()
    return context


# Dynamo.


def raised_through_dynamo(error: Exception, backend: Callable[..., Any], frame: FrameType | None) -> Exception:
    """``error`` as Dynamo raises it unchanged from ``backend``: of its own type, and of BackendCompilerFailed.

    Its traceback begins at ``frame``, and the message is its last line. If Dynamo no longer lets BackendCompilerFailed
    through, the message is wrapped in another error.
    """
    from torch._dynamo.exc import BackendCompilerFailed

    kind, message = type(error), str(error)

    def begin(raised: Any) -> None:
        BackendCompilerFailed.__init__(raised, backend, error, frame)

    members = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__str__": lambda _: message}
    raised: Exception = type(kind.__name__, (kind, BackendCompilerFailed), members | {"__init__": begin})()
    return raised


def hint(number: int | torch.SymInt) -> int | None:
    """``number`` for the sizes that the graph is compiled for, without a guard on them; None if it depends on values.

    If torch renames the hint of a symbolic number, sizes of dynamic shapes count as unknown.
    """
    if isinstance(number, int):
        return number
    found = getattr(number.node, "hint", None)
    return found if isinstance(found, int) else None


def guard_current_graph(name: str, holds: Callable[[], bool]) -> None:
    """Recompile the graph that Dynamo compiles now once ``holds`` is false; it is called on each call of the graph.

    ``name``: what stands for ``holds`` in Dynamo's messages. Nothing outside a torch.compile call. Breaks loudly.
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
    """The backend function that ``compiled`` was compiled with; None for what torch.compile did not return.

    If torch keeps it elsewhere, nobody is warned that a compiled model runs no graph.
    """
    names = getattr(getattr(compiled, "__code__", None), "co_freevars", ())
    context = compiled.__closure__[names.index("self")].cell_contents if "self" in names else compiled
    callback: Any = getattr(getattr(context, "dynamo_ctx", context), "callback", None)
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return getattr(callback, "compiler_fn", None)


# Optimizers and wrappers.


def step_pre_hooks(optimizer: torch.optim.Optimizer) -> Sequence[Callable[..., Any]]:
    """What is called before a step, in order: every optimizer's hooks, then this one's. Breaks loudly."""
    hooks = _optimizers._global_optimizer_pre_hooks, optimizer._optimizer_step_pre_hooks
    return [hook for each in hooks for hook in each.values()]


def step_post_hooks(optimizer: torch.optim.Optimizer) -> Sequence[Callable[..., Any]]:
    """What is called after a step, in order: this optimizer's hooks, then every one's. Breaks loudly."""
    hooks = optimizer._optimizer_step_post_hooks, _optimizers._global_optimizer_post_hooks
    return [hook for each in hooks for hook in each.values()]


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning-rate schedulers that the optimizer has stepped; if torch renames it, they warn of a wrong order."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def running_wrapper() -> DistributedDataParallel | None:
    """The wrapper whose forward is running; torch keeps it for its own compiler. Breaks loudly."""
    wrapper: DistributedDataParallel | None = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    return wrapper
