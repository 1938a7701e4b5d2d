"""Lower the rewritten graph with Inductor, with AOTAutograd alone, or eagerly."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.fx import GraphModule

from fxamp.backend.eager_checkpoints import keep_random_numbers
from fxamp.backend.eager_functions import save_for_second_backward
from fxamp.backend.participants import Participants
from fxamp.capture.autocast_state import autocast_state
from fxamp.errors import MachineError
from fxamp.pipeline.participant import Boxed, boxed
from fxamp.torch_private import keep_saved_tensors

#: A device type that autocast supports and that user tensors never have.
_UNUSED_DEVICE = "ipu"


def lower_graph(gm: GraphModule, inputs: Sequence[Any], participants: Participants) -> Any:
    """Compile ``gm`` with the lowering that the options name, and return a callable."""
    with _compiled_without_autocast(participants.device), _compiler_required():
        lowered = _LOWERINGS[participants.options.lowering](gm, inputs, participants)
    run = participants.run(lowered, gm)
    if participants.options.lowering == "eager":
        save_for_second_backward(gm)  # nothing analyses the graph from here on
        keep_random_numbers(gm)
    return run


@contextmanager
def _compiled_without_autocast(device: str | None) -> Iterator[None]:
    """Disable autocast for ``device`` while AOTAutograd compiles, and whenever the compiled code and its backward run.

    AOTAutograd turns autocast off around a compiled graph if it was on for any device during compilation. So this
    turns it on for a device type that no tensor has.
    """
    if device is None:
        yield
        return
    with autocast_state(device, False), autocast_state(_UNUSED_DEVICE, True):
        yield


@contextmanager
def _compiler_required() -> Iterator[None]:
    """Raise MachineError where Inductor finds no C++ compiler, which it needs for CPUs."""
    try:
        yield
    except Exception as error:
        if "InvalidCxxCompiler" not in (type(error).__name__, *str(error).partition(":")[:1]):
            raise
        raise MachineError(
            "Inductor finds no working C++ compiler, which it needs for a CPU; accepted: install g++ or clang++, name "
            "one in the environment variable CXX, or pass options={'lowering': 'aot_eager'}, which needs none"
        ) from error


def _inductor(gm: GraphModule, inputs: Sequence[Any], participants: Participants) -> Callable[..., Any]:
    from fxamp.backend.inductor import lower_by_inductor

    return lower_by_inductor(gm, inputs, participants)


def _aot_eager(gm: GraphModule, inputs: Sequence[Any], participants: Participants) -> Callable[..., Any]:
    from fxamp.torch_private.parts.dynamo import common as dynamo_backends
    from fxamp.torch_private.parts.functorch import partitioners

    def as_it_is(graph: GraphModule, _: Sequence[Any]) -> Boxed:
        return boxed(graph)

    def forward(graph: GraphModule, inputs: Sequence[Any]) -> Boxed:
        keep_saved_tensors()  # no kernel here would overwrite one
        return as_it_is(graph, inputs)

    lowered = dynamo_backends.aot_autograd(
        fw_compiler=participants.forward(forward),
        bw_compiler=participants.backward(as_it_is),
        partition_fn=participants.partition(partitioners.min_cut_rematerialization_partition),
        keep_inference_input_mutations=True,
    )
    compiled: Callable[..., Any] = lowered(gm, list(inputs))
    return compiled


def _eager(gm: GraphModule, inputs: Sequence[Any], participants: Participants) -> Callable[..., Any]:
    device = participants.device
    if device is None:
        return gm

    def call(*args: Any) -> Any:
        with autocast_state(device, False):
            return gm(*args)

    return call


_LOWERINGS: dict[str, Callable[[GraphModule, Sequence[Any], Participants], Callable[..., Any]]] = {
    "inductor": _inductor,
    "aot_eager": _aot_eager,
    "eager": _eager,
}
