"""Compiled autograd: it traces AOTAutograd's backward graphs itself, without their compilers."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from fxamp.torch_private.dynamo import untraced


def refuse_compiled_autograd_of(refusal: Callable[[Any], Callable[[], None] | None]) -> None:
    """Raise an error where compiled autograd is about to run AOTAutograd's graphs, from now on.

    ``refusal`` gets what :func:`function_of` returns for a graph's node, when compiled autograd traces its backward. It
    returns what raises the error, or None. The error is raised when the backward runs: one that ends the trace would
    leave torch's tracing modes on, and fake tensors in autograd's nodes. The config switch need not be on when the
    forward is compiled: programs set it afterwards, or enable compiled autograd around ``backward()``. Only the first
    ``refusal`` counts. If torch renames the methods that this replaces, nothing is refused.
    """
    from torch._dynamo.compiled_autograd import AutogradCompilerInstance

    kind: Any = AutogradCompilerInstance
    trace, end = (getattr(kind, name, None) for name in ("proxy_call_aot_backward", "end_capture"))
    if trace is None or end is None or hasattr(trace, "__wrapped__"):
        return

    @wraps(trace)
    @untraced
    def trace_noted(compiler: Any, gradients: Any, proxies: Any, saved: Any, proxy: Any, node: Any, *more: Any) -> Any:
        compiler.fxamp_refusal = getattr(compiler, "fxamp_refusal", None) or refusal(node._forward_cls)
        return trace(compiler, gradients, proxies, saved, proxy, node, *more)

    @wraps(end)
    @untraced
    def end_refused(compiler: Any, outputs: Any) -> Any:
        run, compiled = end(compiler, outputs)
        raising = getattr(compiler, "fxamp_refusal", None)
        return (run if raising is None else untraced(lambda *_: raising())), compiled

    kind.proxy_call_aot_backward, kind.end_capture = trace_noted, end_refused
