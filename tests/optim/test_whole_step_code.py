"""Steps that Inductor compiles as a whole, one launch for parameters of different shapes: their code for a GPU."""

from pathlib import Path

import pytest
from support.machines.inductor_code import kernels, machine_code, printed_modules

#: Prints the module of an optimizer's step.
GENERATE = """
import json, sys
from fxamp.tools.bench.cost.hooks import prepare_torch
prepare_torch()
import torch
from torch import nn
from fxamp.optim.reading.layout import read_layout
from fxamp.optim.programs.lowering import StepOptions, decompositions, lower_step
from fxamp.optim.tracing.trace import trace_step
from fxamp.tools.bench.cost.compiler import Counted, counting
from fxamp.tools.bench.cost.simulated_gpu import compiling_for_gpu

def on_gpu(tensors, mode):
    with mode:
        return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in tensors]

(name,) = sys.argv[1:]
parameters = [nn.Parameter(torch.ones(shape)) for shape in ((40, 60), (3, 5), (1000,), ())]
optimizer = getattr(torch.optim, name)(parameters, lr=1e-3)
for parameter in parameters:
    parameter.grad = torch.ones_like(parameter)
optimizer.step()
layout, counted = read_layout(optimizer), Counted(wants_text=True)
with compiling_for_gpu(), counting(counted):
    options = StepOptions(scaled=True, clipped=True)
    traced = trace_step(optimizer, layout, range(len(layout.floats())), True, decompositions(options), on_gpu)
    lower_step(traced, options, range(len(layout.tensors())))
json.dump([text for _, text in counted.texts], sys.stdout)
"""


@pytest.mark.inductor
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["AdamW", "Adagrad"])
def test_whole_steps_compile_for_a_gpu(name: str, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="machine code needs triton's compiler")
    (plain,) = printed_modules(GENERATE, name)
    assert "'combo_grid_meta'" in plain, "parameters of different shapes share a launch"
    for kernel, text in kernels(plain):
        assert machine_code(kernel, text, tmp_path), kernel
