"""AOTAutograd's cache: the graphs that it stores, and a way to make it store backwards."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch._guards import TracingContext
from torch.fx import GraphModule


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


#: What :func:`storing_backwards` got.
_process: ContextVar[Mapping[str, Any]] = ContextVar("fxamp_process")


@contextmanager
def storing_backwards(**process: Any) -> Iterator[None]:
    """Let AOTAutograd's cache store what compilers return, and pass backwards to their compiler at once.

    ``process``: objects of this process that stored ones refer to by name; see :func:`of_this_process`. Breaks loudly.
    """
    from torch._functorch import config

    token = _process.set(process)
    try:
        with config.patch(bundled_autograd_cache=True, force_non_lazy_backward_lowering=True):
            yield
    finally:
        _process.reset(token)


def of_this_process(name: str) -> Any:
    """Return an object of the :func:`storing_backwards` block in which AOTAutograd's cache returns what it stored."""
    return _process.get()[name]


def uncacheable(why: str) -> Exception:
    """Return the error with which AOTAutograd's cache leaves a graph out. Breaks loudly."""
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

    return BypassAOTAutogradCache(why)
