"""What becomes of the rewritten graph: Inductor, AOTAutograd alone, or eager."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule

from fxamp.backend.options import Options


def lower_graph(gm: GraphModule, inputs: Sequence[Any], options: Options, device: str | None) -> Callable[..., Any]:
    """Make ``gm`` callable by the lowering that ``options`` name.

    Autocast for ``device`` is off while the graph is compiled and run: its casts are explicit already.
    """
    with no_autocast(device):
        return _LOWERINGS[options.lowering](gm, inputs, options, device)


def _inductor(gm: GraphModule, inputs: Sequence[Any], options: Options, device: str | None) -> Callable[..., Any]:
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = dict(list_mode_options().get(options.mode, {})) if options.mode else {}
    patches.update(options.inductor)
    compiled: Callable[..., Any] = compile_fx(gm, list(inputs), config_patches=patches)
    return compiled


def _aot_eager(gm: GraphModule, inputs: Sequence[Any], options: Options, device: str | None) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.compilers import nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    compiler = aot_autograd(
        fw_compiler=nop,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    compiled: Callable[..., Any] = compiler(gm, list(inputs))
    return compiled


def _eager(gm: GraphModule, inputs: Sequence[Any], options: Options, device: str | None) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with no_autocast(device):
            return gm(*args)

    return run


_LOWERINGS: dict[str, Callable[[GraphModule, Sequence[Any], Options, str | None], Callable[..., Any]]] = {
    "inductor": _inductor,
    "aot_eager": _aot_eager,
    "eager": _eager,
}


@contextmanager
def no_autocast(device: str | None) -> Iterator[None]:
    """Autocast is off for ``device`` inside; for None nothing changes."""
    if device is None or not torch.is_autocast_enabled(device):
        yield
        return
    torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, True)
