"""What Inductor compiles instead of AOTAutograd's graphs, and how torch's caches store it. Imports Inductor."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx, config
from torch.fx import GraphModule

from fxamp.backend.cache_key import keyed
from fxamp.backend.stored_backward import StoredBackward, loading_with
from fxamp.errors import OptionError
from fxamp.graph import graph_output
from fxamp.listing import KeptValue
from fxamp.passes.backward.scale_backward import gradients
from fxamp.scaler.outside_graphs.borders import compiling_for
from fxamp.torch_private import donated_inputs, keep_saved_tensors, running_metadata, storing_backwards

if TYPE_CHECKING:
    from fxamp.backend.lowering import Compilation


#: Inductor's settings for a backward with values in 8 bits. Inductor writes a value of more ops than this to memory.
#: Conversions from and to 8 bits have about ten: with its own limit for GPUs, 30, some kernels compute again, from all
#: that it is made of, what the kernel before could have written.
_WITH_8_BITS = {"realize_opcount_threshold": 60}


def hooks(
    run: "Compilation", key: str, patches: Mapping[str, Any], stored: bool
) -> tuple[Callable[..., Any], AbstractContextManager[None]]:
    """Return the inner compiler for ``compile_fx``, and the context for that call.

    ``key``: what identifies the graph and its rewriting in the keys of torch's caches. ``patches``: Inductor's
    settings. ``stored``: AOTAutograd's cache stores the graph; else it is off.
    """

    def lower(graph: GraphModule, examples: Sequence[Any], settings: Mapping[str, Any], late: bool) -> Any:
        usual = _WITH_8_BITS if settings.get("is_backward") and run.in_8_bits else {}
        metadata = running_metadata() if late else nullcontext()
        # A backward may be compiled only when it first runs, outside compile_fx.
        with config.patch({**usual, **patches}), metadata, keyed(f"{key} {donated_inputs()}"):
            return compile_fx.compile_fx_inner(graph, examples, **settings)

    def load(
        graph: GraphModule, examples: Sequence[Any], settings: Mapping[str, Any], kept: Sequence[KeptValue]
    ) -> Any:
        if run.kept is not None:
            run.kept.values.extend(kept)
        return run.compile_later(graph, examples, lambda g, e: lower(g, e, settings, True))

    def inner(graph: GraphModule, examples: Sequence[Any], **settings: Any) -> Any:
        backward = bool(settings.get("is_backward"))
        if backward and run.scaling is not None:
            _refuse_sparse(graph)
        if not (stored and backward):
            late = backward and run.unused
            return run.compile(graph, examples, backward, lambda g, e: lower(g, e, settings, late))
        if run.scaling is not None or not run.unused:
            keep_saved_tensors()
        kept = () if run.kept is None else tuple(run.kept.values)
        return StoredBackward(graph, examples, settings, kept, load(graph, examples, settings, ()))

    return inner, _storing(run, load) if stored else _uncached()


def _refuse_sparse(backward: GraphModule) -> None:
    """Raise OptionError if a gradient is sparse: Inductor's code for products of sparse tensors does not run."""
    results: Any = graph_output(backward.graph).args[0]
    if any(results[at].meta["val"].layout is not torch.strided for at in gradients(backward)):
        raise OptionError(
            "a gradient is sparse, as that of an embedding with sparse=True; with a scaler, lowering = 'inductor' "
            "cannot unscale it; accepted: 'aot_eager', 'eager', or sparse=False"
        )


@contextmanager
def _storing(run: "Compilation", load: Callable[..., Any]) -> Iterator[None]:
    scaler = None if run.scaling is None else run.scaling.scaler
    with storing_backwards(), loading_with(load), compiling_for(scaler):
        yield


@contextmanager
def _uncached() -> Iterator[None]:
    """Disable AOTAutograd's cache: it would return a backward that fxamp has not rewritten."""
    with functorch_config.patch(enable_autograd_cache=False):
        yield
