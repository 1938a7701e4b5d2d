"""Dynamo: its errors, guards, sizes and compiled callables."""

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
)
from torch._compile import _disable_dynamo
from torch._guards import TracingContext
from torch.fx import GraphModule, Node

from fxamp.torch_private.autograd import running_backward

P = ParamSpec("P")
T = TypeVar("T")


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """Keep Dynamo from tracing ``function``, and from compiling it where autograd calls it. Breaks loudly.

    It runs eagerly wherever a compiled function calls it. Code that follows a graph break may run a backward, and
    Dynamo compiles what that calls with the program's own backend: every hook and every backward of a Function that
    fxamp gives to autograd needs this. Dynamo is imported, and its state changed, only where it would compile.
    """
    disabled = _disable_dynamo(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if get_eval_frame_callback() is None:  # Dynamo compiles nothing here
            return function(*args, **kwargs)
        return disabled(*args, **kwargs)

    # As torch._dynamo.eval_frame.skip_code, without importing Dynamo.
    code: CodeType = call.__code__  # type: ignore[attr-defined]
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_orig_callable = function  # type: ignore[attr-defined]
    return call


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside an :func:`untraced` one, for callers that are untraced already; others unchanged.

    If torch renames the attributes, each call of a compiled graph turns Dynamo off twice.
    """
    again: Callable[..., Any] = getattr(function, "_torchdynamo_orig_callable", function)
    return again if getattr(function, "_torchdynamo_disable", False) else function


def raised_through_dynamo(error: Exception, backend: Callable[..., Any], frame: FrameType | None) -> Exception:
    """Return ``error`` in a form that Dynamo raises unchanged: of its own type, and of BackendCompilerFailed.

    The traceback starts at ``frame``, and its last line is the message. If Dynamo no longer passes
    BackendCompilerFailed through, the message is wrapped in another error.
    """
    from torch._dynamo.exc import BackendCompilerFailed

    kind, message = type(error), str(error)

    def begin(raised: Any) -> None:
        BackendCompilerFailed.__init__(raised, backend, error, frame)

    members = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__str__": lambda _: message}
    raised: Exception = type(kind.__name__, (kind, BackendCompilerFailed), members | {"__init__": begin})()
    return raised


def called_by_backward() -> bool:
    """Whether Dynamo by itself compiles code that autograd calls: a hook, or the backward of a Function.

    It does so where a backward follows a graph break in a compiled function. False for a callable of torch.compile
    that such code calls, and for what a checkpoint computes again, in which gradients are enabled. If torch renames
    ``compile_wrapper``, such a callable counts as code that autograd calls; the rest breaks loudly.
    """
    from torch.autograd.graph import _engine_run_backward

    if running_backward() == -1 or torch.is_grad_enabled():
        return False
    return _caller(lambda code: code is _engine_run_backward.__code__) is not None


def is_custom_fwd(file: str, function: str) -> bool:
    """Whether a function of this file and name is the wrapper that ``torch.amp.custom_fwd`` puts around a forward."""
    return (file, function) == (torch.amp.autocast_mode.__file__, "decorate_fwd")


def inputs_cast_by_caller(device_type: str) -> torch.dtype | None:
    """Return the ``cast_inputs`` of the ``custom_fwd`` that runs a Function's forward, which Dynamo compiles by itself.

    It does so where a graph breaks at the call of the Function. None without such a request for ``device_type``, and
    for a callable of torch.compile that the forward calls. If torch renames ``decorate_fwd``, it is not found.
    """
    frame = _caller(lambda code: is_custom_fwd(code.co_filename, code.co_name))
    if frame is None or frame.f_locals.get("device_type") != device_type:
        return None
    cast_inputs: torch.dtype | None = frame.f_locals.get("cast_inputs")
    return cast_inputs


def compiles_backward() -> bool:
    """Whether Dynamo compiles the graph of compiled autograd, which is a whole backward, or its continuation.

    False for a callable of torch.compile that a hook in that backward calls. If torch renames ``runtime_wrapper``, the
    graph counts as the program's own.
    """
    from torch._dynamo import compiled_autograd

    if not compiled_autograd.in_compiled_autograd_region:
        return False
    wrapper = ("runtime_wrapper", compiled_autograd.__file__)
    return _caller(lambda code: (code.co_name, code.co_filename) == wrapper, calls=1) is not None


def _caller(matches: Callable[[CodeType], bool], calls: float = 0) -> FrameType | None:
    """Return the innermost frame that runs matching code.

    None if more than ``calls`` callables of torch.compile run in between.
    """
    frame = inspect.currentframe()
    while frame is not None and not matches(frame.f_code):
        calls -= _is_compiled_call(frame.f_code)
        if calls < 0:
            return None
        frame = frame.f_back
    return frame


def _is_compiled_call(code: CodeType) -> bool:
    """Whether ``code`` is what a program calls as a callable of torch.compile."""
    from torch._dynamo import eval_frame

    return (code.co_name, code.co_filename) == ("compile_wrapper", eval_frame.__file__)


def caller_inside() -> CodeType | None:
    """Return the function inside the running torch.compile call that calls the one that Dynamo compiles.

    Dynamo does not trace through that call: it skips the calling function, or a graph breaks at the call. None if the
    compiled function is the one that the program calls, or its continuation after a graph break. If torch renames
    ``compile_wrapper`` or the prefix of continuations, functions count as called where they are not.
    """
    from fxamp.torch_private.parts.dynamo import RESUMED

    compiling = compiling_frame()
    code, frame = (None, None) if compiling is None else (compiling.f_locals.get("code"), compiling.f_back)
    while frame is not None and code is not None:
        if _is_compiled_call(frame.f_code):
            return None
        if not _passes_results_on(frame):
            if not code.co_name.startswith(RESUMED):
                return frame.f_code
            code = frame.f_code
        frame = frame.f_back
    return None


def _passes_results_on(frame: FrameType) -> bool:
    """Whether a frame is Dynamo's own, or one of torch's that wraps calls of modules and functions."""
    wrappers = (torch.nn.modules.module, torch.utils._contextlib, torch.amp.autocast_mode)
    of_dynamo = str(frame.f_globals.get("__name__")).startswith(("torch._dynamo.", "torch._utils_internal"))
    return of_dynamo or frame.f_code.co_filename in [module.__file__ for module in wrappers]


def hint(number: int | torch.SymInt) -> int | None:
    """Return ``number`` for the sizes at compile time, without a guard on them; None if it depends on tensor values.

    If torch renames the hint of a symbolic number, dynamic sizes count as unknown.
    """
    if isinstance(number, int):
        return number
    value = getattr(number.node, "hint", None)
    return value if isinstance(value, int) else None


def guard_current_graph(name: str, holds: Callable[[], bool]) -> None:
    """Recompile the graph that Dynamo is compiling once ``holds``, called in each of its calls, returns False.

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


def source_text(placeholder: Node) -> str:
    """Return the expression by which Dynamo finds an input of its graph, ``"L['self']._parameters['weight']"``.

    ``""`` for another graph's input, and if torch renames the attribute.
    """
    name = getattr(getattr(placeholder, "_dynamo_source", None), "name", "")
    return str(name() if callable(name) else name)


def adopt_sources(captured: GraphModule, gm: GraphModule) -> None:
    """Let AOTAutograd treat ``gm``, made of Dynamo's graph ``captured``, as Dynamo's own.

    AOTAutograd then knows which inputs stay in place between calls: CUDA graphs do not copy them, and saving them for a
    backward costs no memory. Tensors that only ``gm`` holds are constants. If torch renames the sources, all inputs
    count as new in each call.
    """
    from torch._dynamo.source import ConstantSource

    known = getattr(captured, "_param_name_to_source", None)
    if known is None:
        return
    held = [*gm.named_parameters(remove_duplicate=False), *gm.named_buffers(remove_duplicate=False)]
    own = {name: ConstantSource(f"fxamp: {name}") for name, _ in held if name not in known}
    gm._param_name_to_source = {**known, **own}  # type: ignore[assignment]


def backends_of_compiles() -> list[Any] | None:
    """Return the backend of every call of torch.compile since Dynamo was last reset, for any function.

    If torch renames the list, it is None: the first step of an optimizer takes longer.
    """
    from torch._dynamo import eval_frame

    backends = getattr(eval_frame, "cached_backends", None)
    return None if backends is None else list(backends.values())


def on_each_compilation(begins: Callable[..., None], ends: Callable[..., None]) -> None:
    """Call ``begins`` before each of Dynamo's compilations and ``ends`` after it, permanently, in the same thread.

    ``torch._dynamo.reset`` empties Dynamo's lists of callbacks; these stay. Dynamo must not compile them: it would try
    to where a compiled function calls ``backward``, while it holds a lock that a compilation needs. Breaks loudly.
    """
    from torch._dynamo.callback import callback_handler

    callback_handler.start_callbacks = _Lasting(callback_handler.start_callbacks, untraced(begins))
    callback_handler.end_callbacks = _Lasting(callback_handler.end_callbacks, untraced(ends))


class _Lasting(list[Callable[..., None]]):
    """A list of callbacks; ``clear`` leaves those that are to stay."""

    def __init__(self, others: list[Callable[..., None]], one: Callable[..., None]) -> None:
        super().__init__([*others, one])
        self._stay = [*getattr(others, "_stay", ()), one]

    def clear(self) -> None:
        self[:] = self._stay


def compiled_code() -> CodeType | None:
    """Return the code that Dynamo compiles, called from what ``on_each_compilation`` calls; None for another kind.

    If torch renames its function, Dynamo's reasons to skip a function are not known.
    """
    frame = compiling_frame()
    return None if frame is None else frame.f_locals.get("code")


def why_skipped() -> str:
    """Return why Dynamo gives up the function that it was compiling, when a compilation ends; ``""`` if it does not.

    It then runs the function as it is written, unless the user asked for ``fullgraph=True``, which raises.
    """
    from torch._dynamo.exc import Unsupported, UserError

    error, frame = sys.exc_info()[1], compiling_frame()
    if not isinstance(error, (Unsupported, UserError)) or frame is None or frame.f_locals.get("one_graph"):
        return ""
    return str(error)


def compiling_frame() -> FrameType | None:
    """Return the frame of Dynamo's function that compiles one function of the user's; None if none runs.

    If torch renames it, what Dynamo compiles, and why it does not, is not known.
    """
    from torch._dynamo import convert_frame

    compiling = ("_compile", convert_frame.__file__)
    return _caller(lambda code: (code.co_name, code.co_filename) == compiling, calls=math.inf)


def compile_options() -> list[Mapping[str, Any]]:
    """Return the ``options`` of every call of torch.compile since Dynamo was last reset, for any backend.

    Calls with ``disable=True`` are left out. If torch renames the list of backends, it is empty, and a scaler is known
    to be in the options only once a graph was compiled with it.
    """
    backends = backends_of_compiles() or []
    bound = [getattr(getattr(entry, "compiler_fn", entry), "keywords", {}) for entry in backends]
    kwargs = [*bound, *(getattr(entry, "kwargs", {}) for entry in backends)]
    return [options for entry in kwargs if isinstance(options := entry.get("options"), Mapping)]


def backend_of(compiled: Any) -> Any:
    """Return the backend that torch.compile made for ``compiled``; None if torch.compile did not return it.

    If torch moves it, there is no warning that a compiled model runs no graph.
    """
    callback: Any = getattr(context_of(compiled), "callback", None)
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return callback if hasattr(callback, "compiler_fn") else None


def context_of(compiled: Any) -> Any:
    """Return the context of Dynamo's in which ``compiled`` runs, if torch.compile returned it; else ``compiled``.

    A function that torch.compile returned holds it as ``self``, and a module as ``dynamo_ctx``.
    """
    names = getattr(getattr(compiled, "__code__", None), "co_freevars", ())
    context = compiled.__closure__[names.index("self")].cell_contents if "self" in names else compiled
    return getattr(context, "dynamo_ctx", context)
