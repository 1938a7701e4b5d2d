"""Lower the rewritten graph with Inductor, with AOTAutograd alone, or eagerly."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.fx import GraphModule

from fxamp.backend.eager_graph import prepare_eager_graph
from fxamp.backend.participants import Participants
from fxamp.capture.autocast_state import autocast_state, regions_closed_on_error
from fxamp.errors import MachineError
from fxamp.pipeline.participant import Boxed, boxed
from fxamp.torch_private import keep_saved_tensors, traced

#: A device type that autocast supports and that user tensors never have.
_UNUSED_DEVICE = "ipu"


def lower_graph(gm: GraphModule, inputs: Sequence[Any], participants: Participants) -> Any:
    """Compile ``gm`` with the lowering that the options name, and return a callable."""
    lowering = participants.options.lowering
    with _compiled_without_autocast(participants.device), _compiler_required():
        if lowering == "eager":
            lowered = _without_autocast(gm, participants.device)
        elif lowering == "aot_eager":
            lowered = _by_aot_autograd(gm, inputs, participants)
        else:
            from fxamp.backend.inductor import lower_by_inductor

            lowered = lower_by_inductor(gm, inputs, participants)
    run = participants.run(traced(lowered), gm)  # Dynamo calls the result untraced
    if lowering == "eager":
        prepare_eager_graph(gm)
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


def _by_aot_autograd(gm: GraphModule, inputs: Sequence[Any], participants: Participants) -> Callable[..., Any]:
    from fxamp.torch_private.parts.dynamo import common as dynamo_backends
    from fxamp.torch_private.parts.functorch import partitioners

    def forward(graph: GraphModule, _: Sequence[Any]) -> Boxed:
        keep_saved_tensors()  # no kernel here overwrites one
        return boxed(graph)

    compiler = dynamo_backends.aot_autograd(
        fw_compiler=participants.forward(forward),
        bw_compiler=participants.backward(lambda graph, _: boxed(graph)),
        partition_fn=participants.partition(partitioners.min_cut_rematerialization_partition, inputs),
        keep_inference_input_mutations=True,
    )
    compiled: Callable[..., Any] = compiler(gm, list(inputs))
    return compiled


def _without_autocast(gm: GraphModule, device: str | None) -> Callable[..., Any]:
    """Return a callable that runs ``gm`` with autocast off for ``device``; None leaves autocast as it is."""
    state = regions_closed_on_error if device is None else partial(autocast_state, device, False)

    def call(*args: Any) -> Any:
        with state():
            return gm(*args)

    return call
