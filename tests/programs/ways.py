"""The ways to run a program: eager autocast, float32, fxamp, and torch.compile alone; and where Dynamo broke it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from programs import device
from programs.dispatch import reporting_open_regions
from programs.outcome import Outcome, Run, observe
from programs.program import Flavour, Program, Setting
from programs.render import build
from programs.threads import observe_in_threads
from programs.training import train
from torch import Tensor
from torch._dynamo.convert_frame import CatchErrorsWrapper
from torch._dynamo.output_graph import OutputGraph

import fxamp
from fxamp.backend import auto_products
from fxamp.backend.compilation import GraphCompilation
from fxamp.capture.autocast_state import regions_closed_on_error

#: Far from overflow and underflow for gradients around 1.
_SCALE = 2.0**8


def run_plain(program: Program, setting: Setting) -> Outcome:
    """In float32, as Dynamo captures it."""
    built = build(program, draw=setting.values)
    return _observe(Run(built.flat(built.module), built.module, built.inputs, _scaler(setting)), setting)


def run_compiled_by_torch(program: Program, setting: Setting, ambient: bool = False, regions: bool = True) -> Outcome:
    """Through torch.compile alone, in float32 or under autocast.

    ``regions``: as they are, under "aot_eager", because torch's "eager" has no backward of nested regions; else without
    any, under the setting's lowering.
    """
    inlined = nullcontext() if regions else patch.object(torch.compiler, "nested_compile_region", lambda region: region)

    def start() -> Run:
        torch._dynamo.reset()
        whole = setting.schedule == "rewritten"
        with inlined:
            built = build(program, Flavour.ALONE, setting.values)
        backend = "eager" if whole else setting.lowering
        if regions and backend == "eager" and "nested_regions" in program.kinds():
            backend = "aot_eager"
        compiled = torch.compile(built.module, backend=backend, fullgraph=whole)
        call = built.flat(compiled)
        evaluates = call if setting.ambient else None
        call = _under_autocast(call, program) if ambient else call
        return Run(call, built.module, built.inputs, _scaler(setting), start, evaluates)

    with torch._functorch.config.patch(donated_buffer=False):  # else it takes no ``retain_graph=True``
        return _observe(start(), setting)


@contextmanager
def idle_dropout_as_view() -> Iterator[None]:
    """Let torch.compile take dropout that drops nothing for a view of its input, as fxamp does, and not for a copy."""
    dropout = torch.nn.functional.dropout

    def dropping(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return dropout(input, p, training, inplace) if training and p else input.view_as(input)

    with patch.object(torch.nn.functional, "dropout", dropping):
        yield


def run_eager(program: Program, setting: Setting, cached: bool = True) -> Outcome:
    """Under eager autocast, in the oracle's flavour if its casts are ``cached``, with torch's scaler."""
    return run_in_flavour(program, setting, Flavour.ORACLE if cached else Flavour.PROGRAM, cached)


def run_exact(program: Program, setting: Setting) -> Outcome:
    """As :func:`run_eager`, in the exact flavour."""
    return run_in_flavour(program, setting, Flavour.EXACT)


def run_in_flavour(program: Program, setting: Setting, flavour: Flavour, cached: bool = True) -> Outcome:
    """Under eager autocast, in this flavour of its source."""
    built = build(program, flavour, setting.values)
    module, call = built.module, built.flat(built.module)
    evaluates = call if setting.ambient else None
    call = call if setting.own and cached else _under_autocast(call, program, cached, not setting.own)
    with nullcontext() if setting.ambient else patch.object(torch.autograd, "grad", _gradients_outside_of_autocast):
        outcome = _observe(Run(call, module, built.inputs, _scaler(setting), evaluates=evaluates), setting)
    if setting.scaled:  # torch's scaler leaves alone what no optimizer has
        scaled = [
            g
            for name, g in outcome.gradients.items()
            if g is not None and name not in module.state_dict(keep_vars=True)
        ]
        for gradient in scaled:
            gradient /= _SCALE
    return outcome


def _gradients_outside_of_autocast(
    *args: Any, autograd_grad: Callable[..., Any] = torch.autograd.grad, **named: Any
) -> Any:
    """``torch.autograd.grad`` as torch recommends it: autocast would cast the backward of what ran in float32 too."""
    with torch.autocast(device.current(), enabled=False):
        return autograd_grad(*args, **named)


def run_compiled(program: Program, setting: Setting, cached: bool = True) -> Outcome:
    """Through fxamp. Autocast, ambient or of the program, which Dynamo traces, caches its casts if ``cached``."""
    torch._dynamo.utils.counters.clear()

    def start(scale: float = _SCALE) -> Run:
        torch._dynamo.reset()
        built = build(program, draw=setting.values)
        module, inputs = built.module, built.inputs
        if setting.schedule == "rewritten":
            rewritten = fxamp.rewrite(module, built.positional, setting.policy(program.lower))
            return Run(built.flat(rewritten), module, inputs)
        options: dict[str, Any] = {"policy": setting.policy(program.lower), "lowering": setting.lowering}
        if setting.watched:
            options["nonfinite"] = "log"
        scaler = fxamp.GradScaler(device.current(), init_scale=scale) if setting.scaled else None
        if scaler is not None:
            options["scaler"] = scaler
        call = built.flat(torch.compile(module, backend="fxamp", options=options))
        evaluates = call if setting.ambient else None
        call = _under_autocast(call, program, cached, setting.ambient) if setting.ambient or not cached else call
        state = f"{device.current()}-bfloat16-lean" if setting.compiled == "compiled-lean" else None
        optimizes = partial(fxamp.compile_optimizer, policy=state, lowering="aot_eager") if setting.compiled else None
        return Run(call, module, inputs, scaler, lambda: start(2 * _SCALE), evaluates, optimizes)

    with _casting_alone(), _noted():
        return _observe(start(), setting, reporting_open_regions)


@contextmanager
def _casting_alone() -> Iterator[None]:
    """On a CPU on which "auto" casts every program that says nothing."""
    with (
        patch.object(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}),
        patch.object(auto_products, "FLOPS_PER_ELEMENT", 0),
        patch.object(auto_products, "FLOPS_PER_CALL", 0),
    ):
        yield


def _observe(
    run: Run, setting: Setting, regions: Callable[[], AbstractContextManager[None]] = regions_closed_on_error
) -> Outcome:
    torch.manual_seed(7)
    with _captured(setting), regions():
        if setting.schedule == "threads":
            return observe_in_threads(run, setting)
        return train(run, setting) if setting.schedule in ("train", "restart") else observe(run, setting)


def _scaler(setting: Setting) -> torch.amp.GradScaler | None:
    return torch.amp.GradScaler(device.current(), init_scale=_SCALE) if setting.scaled else None


def _captured(setting: Setting) -> AbstractContextManager[None]:
    """Let Dynamo capture sizes and numbers that depend on values, as for ``fullgraph=True``, and perhaps gradients."""
    patched: AbstractContextManager[None] = torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True, trace_autograd_ops=setting.traced
    )
    return patched


def _under_autocast(
    run: Callable[..., list[Tensor]], program: Program, cached: bool = True, enabled: bool = True
) -> Callable[..., list[Tensor]]:
    """``run`` under an ambient autocast; one that is not ``enabled`` says whether those of the program cache."""

    def call(*args: Tensor) -> list[Tensor]:
        with torch.autocast(device.current(), program.lower, enabled, cached):
            return run(*args)

    return call


def breaks() -> list[str]:
    """Why Dynamo broke graphs since its last reset, but where the program asks for it."""
    counters = torch._dynamo.utils.counters
    reasons = [reason.splitlines()[0] for reason in (*counters["graph_break"], *_ENDS)]
    skipped = any("Skipping the frame" in reason for reason in counters["unimplemented"])
    asked = [reason for reason in reasons if "graph_break()" in reason or "torch.autograd.grad" in reason]
    return [reason for reason in reasons if reason not in asked] + ["and skips the whole frame"] * skipped


def frames() -> str:
    """What Dynamo did with the frames of the last compiled run, the policies of its graphs, and why it broke them."""
    counters = torch._dynamo.utils.counters
    reasons = [*counters["unimplemented"], *counters["graph_break"]]
    return f"Dynamo's frames: {_FRAMES}; graphs: {_GRAPHS}; reasons: {reasons}"


#: Why graphs ended in front of more of the program since Dynamo's last reset: it counts no break at a size that depends
#: on values.
_ENDS: list[str] = []

#: Each frame that Dynamo was asked to compile, and what came of it; the policy of each graph.
_FRAMES: list[str] = []
_GRAPHS: list[str] = []


@contextmanager
def _noted() -> Iterator[None]:
    """Note ends, frames and graphs."""
    compile_subgraph, convert, compile_graph = (
        OutputGraph.compile_subgraph,
        CatchErrorsWrapper.__call__,
        GraphCompilation.compile,
    )

    def ending(graph: OutputGraph, tx: Any, reason: Any, *args: Any, **named: Any) -> Any:
        if reason.graph_break:
            _ENDS.append(str(reason.reason).strip())
        return compile_subgraph(graph, tx, reason, *args, **named)

    def converting(wrapper: CatchErrorsWrapper, frame: Any, *args: Any) -> Any:
        place = len(_FRAMES)
        _FRAMES.append(f"{frame.f_code.co_name} raised")
        result = convert(wrapper, frame, *args)
        code, skipped = result.guarded_code, getattr(result, "skip_reason", None)
        _FRAMES[place] = f"{frame.f_code.co_name} {'left: ' + str(skipped) if code is None else 'compiled'}"
        return result

    def compiling(graph: GraphCompilation) -> Callable[..., Any]:
        _GRAPHS.append(f"{getattr(graph._choice.policy, 'name', None)}, {graph._choice.why}")
        return compile_graph(graph)

    for notes in (_ENDS, _FRAMES, _GRAPHS):
        notes.clear()
    with (
        patch.object(OutputGraph, "compile_subgraph", ending),
        patch.object(CatchErrorsWrapper, "__call__", converting),
        patch.object(GraphCompilation, "compile", compiling),
    ):
        yield
