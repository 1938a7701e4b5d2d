"""The protocol of participants in a compiled graph, which work on it besides its casts, such as loss scaling.

AOTAutograd derives a joint graph of forward and backward from the graph with the casts, partitions it, and passes both
parts to a compiler. A participant can change each of these, and wrap each run of the result.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from fxamp.capture import Captured
from fxamp.errors import OptionError
from fxamp.graph_text import KeptValue, Listing
from fxamp.torch_private import current_metadata, graph_metadata, refuse_compiled_autograd_of

#: A compiled graph that takes its inputs in one list and empties the list.
Boxed = Callable[[list[Any]], Any]

#: Compiles one of AOTAutograd's graphs for its example inputs. It may change the graph.
GraphCompiler = Callable[[GraphModule, Sequence[Any]], Boxed]

#: Splits a joint graph, with its example inputs, into a forward and a backward.
Partitioner = Callable[..., tuple[GraphModule, GraphModule]]


class Participant:
    """Takes part in one graph. Methods that a participant does not define change nothing.

    Methods that get a partitioner, a compiler or a run return a replacement, which usually calls it. ``lowering`` is
    the option of that name. ``kept``: the values that the forward saves for the backward, if this participant packs
    them.
    """

    kept: Sequence[KeptValue] = ()

    @property
    def needs_backward(self) -> str | None:
        """What it does to each run of a backward graph, as the beginning of a sentence; None if it does nothing.

        Compiled autograd would leave that out without an error.
        """
        return None

    @property
    def key(self) -> object:
        """A value for the keys of torch's caches, besides the policy: equal ``repr`` must mean equal code."""
        return None

    def refuse(self, lowering: str, inductor: Mapping[str, Any]) -> None:
        """Raise OptionError if it cannot take part with these options; called before anything is traced.

        What needs the runs of backward graphs refuses compiled autograd, here and in each backward from now on.
        """
        if self.needs_backward:
            refuse_compiled_autograd(self.needs_backward)
            refuse_compiled_autograd_of(_late_refusal)

    def captured(self, graph: Captured, inputs: Sequence[Any], listing: Listing) -> None:
        """Change the captured graph, which has its casts, for ``inputs``; ``listing`` describes it."""

    def read_backward(self, backward: GraphModule, lowering: str) -> None:
        """Read the backward that AOTAutograd derives or its cache returns; raise OptionError if it cannot take part."""

    def partition(self, partitioner: Partitioner, lowering: str) -> Partitioner:
        """Change the joint graph, or its two parts together."""
        return partitioner

    def forward(self, compiler: GraphCompiler) -> GraphCompiler:
        """Change the forward."""
        return compiler

    def backward(self, compiler: GraphCompiler) -> GraphCompiler:
        """Change the backward, or wrap its runs."""
        return compiler

    def run(self, run: Callable[..., Any], gm: GraphModule, lowering: str) -> Callable[..., Any]:
        """Wrap each run of the graph ``gm``, which ``run`` runs; called when everything else is compiled."""
        return run


def boxed(function: Callable[..., Any]) -> Boxed:
    """Return ``function`` with all its arguments in one list."""

    def run(args: list[Any]) -> Any:
        return function(*args)

    return takes_list(run)


def takes_list(run: Boxed) -> Boxed:
    """Mark ``run`` for AOTAutograd as a callable that takes its inputs in one list and empties it."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def refuse_eager(what: str, lowering: str) -> None:
    """Raise OptionError if no graph of the backward is derived, which ``what`` needs."""
    if lowering == "eager":
        raise OptionError(
            f"{what}, but lowering = 'eager' leaves the backward to autograd, without a graph; accepted with these "
            "rules: 'inductor', 'aot_eager'"
        )


def uses_cuda_graphs(inductor: Mapping[str, Any]) -> bool:
    """Whether Inductor makes CUDA graphs with these settings."""
    return bool(inductor.get("triton.cudagraphs", torch._inductor.config.triton.cudagraphs))


#: Attribute of AOTAutograd's metadata of a graph: what compiled autograd would leave out of its backward, a text.
_NEEDS_BACKWARD = "fxamp_needs_backward"


def needing_backward(compiler: GraphCompiler, members: Sequence[Participant]) -> GraphCompiler:
    """Return ``compiler`` for the forward of a graph whose backward compiled autograd must not trace for ``members``.

    A program may enable compiled autograd after the forward was compiled; then its backward raises OptionError.
    """
    needs = next((member.needs_backward for member in members if member.needs_backward), None)
    if needs is None:
        return compiler

    def compile_marked(gm: GraphModule, inputs: Sequence[Any]) -> Boxed:
        metadata = current_metadata()
        if metadata is not None:
            setattr(metadata, _NEEDS_BACKWARD, needs)
        return compiler(gm, inputs)

    return compile_marked


def _late_refusal(function: Any) -> Callable[[], None] | None:
    for metadata in graph_metadata(function):
        needs = getattr(metadata, _NEEDS_BACKWARD, None)
        if needs is not None:
            return partial(_refuse_late, needs)
    return None


def _refuse_late(needs: str) -> None:
    raise OptionError(
        f"{needs}, but compiled autograd, enabled after the forward was compiled, bypasses the compiler of "
        "AOTAutograd's backward graphs; accepted: backward() without compiled autograd"
    )


def refuse_compiled_autograd(what: str) -> None:
    """Raise OptionError if backward graphs are not compiled by AOTAutograd's compilers, which ``what`` needs."""
    if torch._dynamo.config.compiled_autograd:
        raise OptionError(
            f"{what}, but torch._dynamo.config.compiled_autograd bypasses the compiler of AOTAutograd's backward "
            "graphs; accepted: compiled_autograd = False"
        )
