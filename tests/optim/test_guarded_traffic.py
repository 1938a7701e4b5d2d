"""What a compiled step reads and writes, and that guarding it changes no bit."""

import re
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from support.checks.exhaustive import each_once
from support.oracles.guarded_runs import SCENARIOS, Training, on_device
from support.programs.every_optimizer import OPTIMIZERS
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

from fxamp.capture import Captured
from fxamp.optim.programs.lowering import StepOptions, decompositions, lower_step, must_lift
from fxamp.optim.reading.layout import Layout, read_layout
from fxamp.optim.tracing.counters_as_tensors import counters_as_tensors
from fxamp.optim.tracing.trace import Traced, trace_step
from fxamp.passes.base import Context
from fxamp.passes.sequences import step
from fxamp.passes.step.fold_unscale import GRADIENT
from fxamp.passes.step.guard_updates import updates
from fxamp.pipeline import run_passes

SHAPE = (64, 32)
COUNT = 3
BOTH = StepOptions(scaled=True, clipped=True)


def prepared(name: str = "AdamW", options: StepOptions = BOTH) -> tuple[Traced, Layout, torch.optim.Optimizer]:
    """The traced step of an optimizer whose state is there, on float32 parameters of one shape."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(SHAPE, generator=generator)) for _ in range(COUNT)]
    for parameter in parameters:
        parameter.grad = torch.randn(SHAPE, generator=generator)
    optimizer = OPTIMIZERS[name](parameters)
    optimizer.step()
    for owner, entry in counters_as_tensors(optimizer, read_layout(optimizer)).items():
        optimizer.state[owner].update(entry)
    layout = read_layout(optimizer)
    return trace_step(optimizer, layout, range(len(layout.floats())), True, decompositions(options)), layout, optimizer


def test_the_step_reads_16_and_writes_12_bytes_a_parameter_with_unscaling_and_clipping() -> None:
    """In the graph: inputs that are used, mutations. 0-dim counters and factors are not worth counting."""
    traced, _, _ = prepared()
    lift = must_lift(traced.module, BOTH)
    passes = step(BOTH, lifted=lift, for_inductor=True)
    run_passes(Captured(traced.module, traced.mode), Context(traced.mode), *passes)
    inputs = [n for n in traced.module.graph.find_nodes(op="placeholder") if n.users and _big(n.meta["val"])]
    written = [n for n in updates(traced.module) if _big(n.meta["val"])]
    elements = COUNT * SHAPE[0] * SHAPE[1]
    assert sum(_bytes(n.meta["val"]) for n in inputs) == 16 * elements
    assert sum(_bytes(n.args[0].meta["val"]) for n in written) == 12 * elements


def _big(value: object) -> bool:
    return isinstance(value, Tensor) and value.shape == SHAPE


def _bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


@pytest.mark.inductor
def test_generated_code_reads_every_gradient_in_one_kernel_and_keeps_nothing_in_between() -> None:
    """28 bytes by the code that runs: each buffer in one kernel, none allocated but for 0-dim values."""
    traced, layout, _ = prepared()
    # Names of the inputs, in the generated code, are those of the graph.
    gradients = [n.name for n in traced.module.graph.find_nodes(op="placeholder") if GRADIENT in n.meta]
    with inductor_config.patch(fx_graph_cache=False):
        run, (code,) = run_and_get_code(lower_step, traced, BOTH, range(len(layout.tensors())))
    run(layout.tensors(), layout.floats(), [torch.tensor(1.0)] * 2 + [torch.tensor(0.0)])
    calls = [line for line in code.splitlines() if re.match(r"\s+cpp_fused\w*\(", line)]
    assert calls and len(gradients) == COUNT
    for name in gradients:
        assert sum(re.search(rf"\b{name}\b", line) is not None for line in calls) == 1, name
    allocated = re.findall(r"= empty_strided_cpu\(\(([^)]*)\)", code)
    assert all(not size.strip() or size.strip() == "1," for size in allocated), allocated


@each_once(
    "name, lowering", ["AdamW", "SGD", "NAdam"], ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)]
)
def test_a_guarded_step_that_is_not_skipped_is_the_unguarded_one_bit_for_bit(name: str, lowering: str) -> None:
    results = []
    for guarded in (True, False):
        options = StepOptions(True, False, guarded, lowering)
        traced, layout, _ = prepared(name, options)
        flag = [torch.tensor(0.0)] if guarded else []
        run = lower_step(traced, options, range(len(layout.tensors())))
        for _ in range(3):
            run(layout.tensors(), layout.floats(), [torch.tensor(0.125), *flag])
        results.append(layout.tensors())
    assert_equal(*results)


def test_the_check_is_asked_once_with_and_without_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 bytes a parameter besides the step: one read, which makes the norm as well."""
    import fxamp.kernels

    calls: list[bool] = []
    real = fxamp.kernels.check_

    def counting(
        grads: Any, found_inf: Tensor, flags: Tensor | None = None, squared_norm: Tensor | None = None
    ) -> None:
        calls.append(squared_norm is not None)
        real(grads, found_inf, flags, squared_norm)

    trainings = {
        scenario: Training(OPTIMIZERS["AdamW"], on_device()).run(SCENARIOS["clean"], steps=[0])
        for scenario in ("clipping", "clean")
    }
    monkeypatch.setattr(fxamp.kernels, "check_", counting)
    monkeypatch.setattr(fxamp.kernels, "check_unscale_", None)
    for scenario, training in trainings.items():
        training.run(SCENARIOS[scenario], steps=[1, 2])
    assert calls == [True, True, False, False]
