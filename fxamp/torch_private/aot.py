"""AOTAutograd: the metadata of its graphs, and the tensors that their backwards keep."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from typing import Any

import torch
from torch._guards import CompileContext, TracingContext, compile_context, tracing
from torch.fx import traceback as fx_traceback
from torch.utils.checkpoint import CheckpointPolicy

from fxamp.torch_private.autograd import Node, function_of, running_node
from fxamp.torch_private.tracing import compiling_flag, without_autocast


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


def owner_of_gradient(description: Any) -> int | None:
    """Return which input of the graph a result of its backward is the gradient of, given AOTAutograd's description.

    None for another result. If torch changes its descriptions, no owner is known.
    """
    while getattr(description, "base", None) is not None:  # of a part of a wrapper
        description = description.base
    number: int | None = getattr(getattr(description, "grad_of", None), "idx", None)
    return number


def written_input(description: Any) -> Any:
    """Return the description of the input that a result of a forward replaces when it returns, given its description.

    None for another result. If torch changes its descriptions, the backward of a graph that writes to an input with a
    gradient may raise an error about a modified variable.
    """
    return getattr(description, "mutated_input", None)


def current_metadata() -> Any:
    """Return AOTAutograd's metadata of the forward that it is compiling; None outside a compilation.

    If torch moves it, fxamp does not recognise its graphs in the autograd graph, see :func:`graph_metadata`.
    """
    context = TracingContext.try_get()
    return None if context is None else context.fw_metadata


def forward_results(outputs: Sequence[Any], metadata: Any) -> Sequence[Any]:
    """Return those ``outputs`` of the forward being compiled that are not saved tensors. Breaks loudly.

    ``metadata``: from :func:`current_metadata`. With tensor subclasses it lists no tangents.
    """
    return outputs[: metadata.num_forward]


@contextmanager
def _compiling_with(metadata: Any) -> Iterator[None]:
    """Make ``metadata`` the current metadata inside, unless it is None."""
    context = TracingContext.try_get()
    if context is None or metadata is None:
        yield
        return
    before, context.fw_metadata = context.fw_metadata, metadata
    try:
        yield
    finally:
        context.fw_metadata = before


def running_metadata() -> AbstractContextManager[None]:
    """Make AOTAutograd's metadata of the backward that is running the current metadata inside.

    It is then as if the backward were compiled with its forward. Breaks loudly.
    """
    metadata = [entry for entry in graph_metadata(function_of(running_node())) if entry is not None]
    return _compiling_with(metadata[-1] if metadata else None)


def compiling_again() -> Callable[[], AbstractContextManager[None]]:
    """Return a function that restores AOTAutograd's current compile contexts, for a graph that is compiled later.

    As in Dynamo, one thread compiles at a time, and all threads can see that one does. Breaks loudly. If torch adds
    other contexts, its logs of the later compilation lack their information.
    """
    noted, compilation = TracingContext.try_get(), CompileContext.try_get()

    @contextmanager
    def again() -> Iterator[None]:
        with compiling_flag(everywhere=True), tracing(noted), compile_context(compilation), without_autocast():
            yield

    return again


def keep_saved_tensors(node: Node | None = None) -> None:
    """Forbid the kernels of a backward to overwrite tensors that the forward saved, except :func:`overwriting_saved`.

    So ``retain_graph=True`` works as in eager mode. torch reads the list of donated buffers at run time too. torch's
    config switch leaves None there, which torch treats as a non-empty list. If torch renames the list,
    ``retain_graph=True`` raises an error from torch.

    ``node``: autograd's node of the graph; None for the graph that AOTAutograd is compiling.
    """
    for metadata in [current_metadata()] if node is None else graph_metadata(function_of(node)):
        if metadata is not None and metadata.bw_donated_idxs != []:
            metadata.fxamp_donated, metadata.bw_donated_idxs = metadata.bw_donated_idxs, []


def overwriting_saved() -> AbstractContextManager[None]:
    """Let the backward that is compiled inside overwrite the tensors that :func:`keep_saved_tensors` forbade.

    It must not run if its graph is kept for another backward.
    """
    donated = getattr(current_metadata(), "fxamp_donated", None)
    if donated is None:
        return nullcontext()
    overwriting = copy(current_metadata())  # at run time, other threads read the list of the graph's own
    overwriting.bw_donated_idxs = donated
    return _compiling_with(overwriting)


def donated_inputs() -> list[int] | None:
    """Return which saved tensors the kernels of the current graph's backward may overwrite.

    Inductor's code depends on this, but its cache's keys do not. If torch renames it, the cache can return a backward
    that overwrites tensors which it must not overwrite, as can happen without fxamp.
    """
    return getattr(current_metadata(), "bw_donated_idxs", None)


@contextmanager
def computed_again() -> Iterator[None]:
    """Mark ops that AOTAutograd traces inside for recomputation in the backward, so that their results are not kept.

    Marks that a checkpoint has set do not change. If torch changes the marks, the backward may keep the results.
    """
    marks = {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": 0}
    meta: dict[str, Any] = fx_traceback.get_current_meta()
    if not fx_traceback.has_preserved_node_meta() or meta.keys() & marks.keys():
        yield
        return
    meta.update(marks)
    try:
        yield
    finally:
        for key in marks:
            meta.pop(key, None)


_EXACTLY = "fxamp_kept_exactly"


def kept_exactly() -> AbstractContextManager[None]:
    """Mark ops that AOTAutograd traces inside: the results that the backward needs are saved unpacked.

    If torch no longer copies annotations to traced nodes, a policy's rules round gradients that a forward makes.
    """
    return fx_traceback.annotate({_EXACTLY: True})


def is_kept_exactly(node: torch.fx.Node) -> bool:
    """Whether :func:`kept_exactly` marks the node."""
    return _EXACTLY in node.meta.get("custom", {})
