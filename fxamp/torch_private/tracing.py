"""Tracing: torch's state while code is traced, and a make_fx whose effects other threads cannot see."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from types import MethodType
from typing import Any, Literal, TypeVar

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import _MakefxTracer

Mode = TypeVar("Mode")


def compile_lock() -> AbstractContextManager[Any]:
    """Return Dynamo's lock, an RLock: who holds it is the only thread that traces or compiles. Breaks loudly."""
    from torch._dynamo import convert_frame

    return convert_frame.compile_lock


def make_fx(
    function: Callable[..., Any],
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    *,
    tracing_mode: Literal["real", "fake"] = "real",
    pre_dispatch: bool = False,
    allow_non_fake_inputs: bool = False,
) -> Callable[..., GraphModule]:
    """Return torch's ``make_fx(function, ...)``, without its effects on other threads.

    torch's own patches ``nn.Module`` and says to the whole process that fx is tracing: a second trace restores the
    patches of the first one, and compiled models of other threads raise. Here nothing is patched, and one thread traces
    at a time. If torch renames its parts, it breaks loudly; if torch patches elsewhere, tests/torch_private finds it.
    """

    def traced(*inputs: Any) -> GraphModule:
        tracer = _Tracing(decompositions, tracing_mode, allow_non_fake_inputs, pre_dispatch, False, False, True)
        with compile_lock():
            return tracer.trace(function, *inputs)

    return traced


class _Tracing(_MakefxTracer):
    @contextmanager
    def _init_modes_from_inputs(self, *inputs: Any) -> Iterator[None]:
        with super()._init_modes_from_inputs(*inputs):
            # The tracer stays of its own class, which torch compares.
            tracer: Any = self.fx_tracer
            tracer.trace = MethodType(_trace, tracer)
            yield


def _trace(tracer: Any, function: Callable[..., Any], concrete_args: Any) -> Graph:
    """``Tracer.trace`` without its patches, which intercept calls of modules and of wrapped functions.

    make_fx records ops by its modes, and lets all that the patches intercept pass.
    """
    tracer.root, tracer.tensor_attrs = torch.nn.Module(), {}
    tracer.graph = Graph(tracer_cls=type(tracer))
    run, inputs = tracer.create_args_for_root(function, False, concrete_args)
    tracer.create_node("output", "output", (tracer.create_arg(run(*inputs)),), {})
    tracer.submodule_paths = None
    graph: Graph = tracer.graph
    return graph


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


class _InThisThread:
    """A flag that is true in one thread; in others it is what it was before."""

    def __init__(self, before: object) -> None:
        self._thread, self._before = get_ident(), before

    def __bool__(self) -> bool:
        return get_ident() == self._thread or bool(self._before)


class _EagerInThisThread:
    """A stance of torch.compile: in one thread, compiled functions run as written; others keep their stance."""

    def __init__(self, before: object) -> None:
        self._thread, self._before = get_ident(), before

    def __getattr__(self, name: str) -> Any:
        if name == "stance" and get_ident() == self._thread:
            return "force_eager"
        return getattr(self._before, name)


@contextmanager
def compiled_as_written() -> Iterator[None]:
    """Run what torch.compile returned as it is written inside, in this thread; only one thread at a time can be inside.

    Dynamo compiles nothing where fx traces: it skips such a function, in all later calls too, and a later call of one
    with ``fullgraph=True`` raises. Breaks loudly.
    """
    from torch._dynamo import eval_frame

    with compile_lock():
        before = eval_frame._stance
        eval_frame._stance = _EagerInThisThread(before)  # type: ignore[assignment]
        try:
            yield
        finally:
            eval_frame._stance = before


@contextmanager
def compiling_flag(everywhere: bool = False) -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` true inside; only one thread at a time can be inside.

    So torch's optimizers take the path that reads no value on the host. With ``everywhere`` other threads see the flag
    too: torch's own compilers patch the process, which compiled models of other threads must know. If torch renames the
    flag, optimizers read values of fake tensors, and the host decides on their steps.
    """
    with compile_lock():
        before = torch.compiler._is_compiling_flag
        torch.compiler._is_compiling_flag = True if everywhere else _InThisThread(before)  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag = before


def without_autocast() -> AbstractContextManager[Any]:
    """Disable autocast for every device inside; restore it on exit. Breaks loudly."""
    return torch._C._DisableAutocast()


def without_fake_mode() -> AbstractContextManager[Any]:
    """Compute real tensors inside, even where a fake mode is on. Breaks loudly."""
    return unset_fake_temporarily()
