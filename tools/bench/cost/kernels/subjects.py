"""The generated kernels that are counted: gradients, the scale, and steps of optimizers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import fxamp
from fxamp.kernels import Implementation, forced
from fxamp.kernels.blockwise_8bit import BLOCK, SCALES
from fxamp.kernels.gradient_request import ScaleRule
from fxamp.kernels.gradient_triton import kernel_name, parameters, source_text
from fxamp.kernels.launch import OPTIONS
from fxamp.kernels.launch_plan import CHUNK, Access, Gradient, Requested, make_plan
from fxamp.kernels.loss_scale_update_triton import update_text
from fxamp.optim import CompiledOptimizer
from fxamp.optim.kernels.launch_size import SCALARS_OPTIONS, STEP_OPTIONS, step_block
from fxamp.optim.kernels.scalars import NAME as SCALARS
from fxamp.optim.kernels.scalars import scalars_parameters, scalars_text
from fxamp.optim.kernels.step_triton import NAME, Aligned, step_parameters, step_text
from fxamp.optim.programs.kind_step import KindStep, kernel_inputs
from fxamp.optim.programs.lowering import StepOptions
from fxamp.optim.programs.step_parts import compile_parts, pack_state
from fxamp.optim.reading.layout import read_layout
from fxamp.policy import Policy

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Program:
    """A kernel as a launch compiles it.

    Attributes:
        name, text: the function and its module's source.
        signature: Triton's type of each parameter.
        aligned: how many of the first parameters start at multiples of 16 bytes.
        options: Triton's.
        block: elements that a program handles at a time; 0 for a kernel without elements.
        chunk: elements of a whole program.
    """

    name: str
    text: str
    signature: Mapping[str, str]
    aligned: int
    options: Mapping[str, Any]
    block: int
    chunk: int = CHUNK


@dataclass(frozen=True)
class Subject:
    """A kernel to count.

    Attributes:
        name: for the table.
        aligned: whether its tensors start at multiples of 16 bytes.
        ideal: the least bytes per element that it can move.
        program: the kernel for a GPU with warps of this many lanes.
    """

    name: str
    aligned: bool
    ideal: float
    program: Callable[[int], Program]


def subjects() -> list[Subject]:
    """Return all kernels to count."""
    return [
        *(subject for aligned in (True, False) for subject in _gradients(aligned)),
        Subject("scale update", True, 0.0, lambda wave: _update()),
        *(subject for name, step in STEPS.items() for subject in _steps(name, step)),
    ]


def _gradients(aligned: bool) -> list[Subject]:
    flags = Requested(found_inf=True, flags=True)
    normed = Requested(found_inf=True, flags=True, squared_norm=True)

    def subject(name: str, source: torch.dtype, target: torch.dtype | None, requested: Requested) -> Subject:
        ideal = source.itemsize + (target.itemsize if target else 0)
        return Subject(name, aligned, ideal, lambda wave: _gradient(source, target, aligned, requested, wave))

    return [
        subject("check float16", F16, None, flags),
        subject("check float32", F32, None, flags),
        subject("unscale float32", F32, F32, flags),
        subject("float16 to float32", F16, F32, flags),
        subject("bfloat16 to float32", BF16, F32, flags),
        subject("float16 to float32, norm", F16, F32, normed),
    ]


def _gradient(
    source: torch.dtype, target: torch.dtype | None, aligned: bool, requested: Requested, wave: int
) -> Program:
    others = Access.PEELED if target in (None, source) else Access.NARROW
    plan = make_plan((Gradient(1, source, target, Access.WIDE if aligned else others, True),), requested, wave)
    kernel = plan.groups[0].kernel
    return Program(kernel_name(kernel), source_text(kernel), parameters(kernel), 2, OPTIONS, kernel.block)


def _update() -> Program:
    signature = {"scale": "*fp32", "growth_tracker": "*i32", "found_inf": "*fp32"}
    text, options = update_text(ScaleRule(2.0, 0.5, 2000)), {"num_warps": 1, "enable_fp_fusion": False}
    return Program("update_scale", text, signature, 0, options, 0)


@dataclass(frozen=True)
class Step:
    """An optimizer whose step is counted: how it is made, its parameters' dtype, its policy's [optimizer] table."""

    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    dtype: torch.dtype = F32
    table: str = ""


_CHANCE = 'rounding = "stochastic"'
#: The steps to count, by name.
STEPS = {
    "SGD, momentum": Step(partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "AdamW": Step(torch.optim.AdamW),
    "AdamW, bfloat16 state": Step(torch.optim.AdamW, table='state = "bfloat16"'),
    "AdamW, 8bit state": Step(torch.optim.AdamW, table='state = "8bit"'),
    "AdamW, bfloat16 state, stochastic": Step(torch.optim.AdamW, table=f'state = "bfloat16"\n{_CHANCE}'),
    "AdamW, 8bit state, stochastic": Step(torch.optim.AdamW, table=f'state = "8bit"\n{_CHANCE}'),
    "AdamW, bfloat16, 8bit state, stochastic": Step(torch.optim.AdamW, BF16, f'state = "8bit"\n{_CHANCE}'),
}


def _steps(name: str, step: Step) -> list[Subject]:
    """The step, clipped, unscaled and guarded: that is the most it does."""
    gm = _part(step).traced.module
    inputs = kernel_inputs(gm)
    ideal = 0.0
    for node, cell in inputs.cells.items():
        value = node.meta["val"]
        if value.dim() and cell != "numbers":
            writes = any(user.target is torch.ops.aten.copy_.default and user.args[0] is node for user in node.users)
            ideal += (1 + writes) * value.itemsize / (BLOCK if value.dtype is SCALES else 1)

    def program(aligned: bool, wave: int) -> Program:
        block = step_block(wave)
        text = step_text(gm, inputs, Aligned.ALL if aligned else Aligned.NONE, block)
        return Program(NAME, text, step_parameters(gm, inputs), 2, STEP_OPTIONS, block)

    own = [Subject(name, aligned, ideal, partial(program, aligned)) for aligned in (True, False)]
    first = scalars_text(gm, inputs)
    if name != "AdamW" or first is None:
        return own
    scalars = Program(SCALARS, first, scalars_parameters(inputs), 2, SCALARS_OPTIONS, 0)
    return [Subject("AdamW, 0-dim values", True, 0.0, lambda wave: scalars), *own]


def _part(step: Step) -> KindStep:
    parameter = nn.Parameter(torch.ones(2 * BLOCK, dtype=step.dtype))
    optimizer = step.make([parameter])
    if step.table:
        policy = Policy.loads(f'extends = ["cpu-bfloat16"]\n[optimizer]\n{step.table}\n')
        optimizer = fxamp.compile_optimizer(optimizer, policy)
    parameter.grad = torch.ones_like(parameter)
    options = StepOptions(scaled=True, clipped=True, guarded=True, lowering="inductor")
    with forced(Implementation.INTERPRETER):
        optimizer.step()
        options = options._replace(precision=CompiledOptimizer.of(optimizer).precision)
        pack_state(optimizer, read_layout(optimizer), options)
        (part,) = compile_parts(optimizer, read_layout(optimizer), options).parts
    assert isinstance(part, KindStep)
    return part
