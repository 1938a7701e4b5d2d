"""What becomes of the rewritten graph: Inductor, AOTAutograd alone, or eager."""

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch.fx import GraphModule

from fxamp.backend.autocast_off import compiled_without_autocast, no_autocast
from fxamp.backend.options import Options
from fxamp.backend.scaled import Scaling, boxed, uncached
from fxamp.backend.scaled_eager import scale_eagerly


def lower_graph(
    gm: GraphModule, inputs: Sequence[Any], options: Options, device: str | None, scaling: Scaling | None = None
) -> Callable[..., Any]:
    """Make ``gm`` callable by the lowering that ``options`` name.

    Autocast for ``device`` is off while the graph is compiled and run: its casts are explicit already. With ``scaling``
    the backward is scaled, unscaled and checked.
    """
    with compiled_without_autocast(device):
        return _LOWERINGS[options.lowering](gm, inputs, options, device, scaling)


def _inductor(
    gm: GraphModule, inputs: Sequence[Any], options: Options, device: str | None, scaling: Scaling | None
) -> Callable[..., Any]:
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    patches = dict(list_mode_options().get(options.mode, {})) if options.mode else {}
    patches.update(options.inductor)
    if scaling is None:
        return cast(Callable[..., Any], compile_fx(gm, list(inputs), config_patches=patches))

    def inner_compile(graph: GraphModule, examples: Sequence[Any], **kwargs: Any) -> Any:
        if not kwargs.get("is_backward"):
            return compile_fx_inner(graph, examples, **kwargs)
        return scaling.compile_backward(graph, examples, lambda g, e: compile_fx_inner(g, e, **kwargs))

    with uncached():
        compiled = compile_fx(gm, list(inputs), inner_compile=inner_compile, config_patches=patches)
    return cast(Callable[..., Any], compiled)


def _aot_eager(
    gm: GraphModule, inputs: Sequence[Any], options: Options, device: str | None, scaling: Scaling | None
) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.compilers import nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def backward(graph: GraphModule, examples: Sequence[Any]) -> Any:
        assert scaling is not None
        return scaling.compile_backward(graph, examples, lambda rewritten, _: boxed(rewritten))

    compiler = aot_autograd(
        fw_compiler=nop,
        bw_compiler=nop if scaling is None else backward,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    compiled: Callable[..., Any] = compiler(gm, list(inputs))
    return compiled


def _eager(
    gm: GraphModule, inputs: Sequence[Any], options: Options, device: str | None, scaling: Scaling | None
) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with no_autocast(device):
            return gm(*args)

    return run if scaling is None else scale_eagerly(run, gm, scaling.scaler)


_Lowering = Callable[[GraphModule, Sequence[Any], Options, str | None, Scaling | None], Callable[..., Any]]

_LOWERINGS: dict[str, _Lowering] = {
    "inductor": _inductor,
    "aot_eager": _aot_eager,
    "eager": _eager,
}
