"""The generated step: its text, its values in Triton's interpreter, its machine code for GPUs that need not be here."""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from step_kernels import SHAPES, by_eager_ops, prepared
from support.checks.equality import assert_equal
from support.checks.exhaustive import exhaustive
from support.checks.golden_text import assert_golden
from support.machines.machine_code import ARCHS, TARGETS, MachineCode, machine_code
from support.oracles.guarded_runs import parts_of
from support.programs.every_optimizer import ARGUMENTS, OPTIMIZERS
from support.programs.user_optimizers import Counting
from torch import Tensor, nn

import fxamp
from fxamp.kernels import Implementation, forced
from fxamp.kernels.blockwise_8bit import SCALES
from fxamp.optim import CompiledOptimizer, Factors, StepOptions
from fxamp.optim.kernels.launch import StepKernel
from fxamp.optim.kernels.launch_size import STEP_OPTIONS, step_block
from fxamp.optim.kernels.step_triton import NAME, Aligned, step_parameters, step_text
from fxamp.optim.programs.kind_step import kernel_inputs
from fxamp.policy import Policy

KERNELS = {name: OPTIMIZERS[name] for name in ARGUMENTS if name not in ("LBFGS", "Muon", "Adafactor")}
KERNELS["a user's own"] = Counting


def test_the_text_for_adamw() -> None:
    _, _, part = prepared(OPTIMIZERS["AdamW"])
    assert part.source is not None
    assert_golden("optim/optimizer-step-adamw", part.source)


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CASES = [*((name, torch.float32) for name in KERNELS), *(("AdamW", dtype) for dtype in DTYPES[1:])]
USUAL = [("AdamW", torch.bfloat16), *((name, torch.float32) for name in ("AdamW", "SGD", "RMSprop", "a user's own"))]


@pytest.mark.parametrize("case", exhaustive(CASES, always=USUAL), ids=lambda case: f"{case[0]}-{case[1]}")
def test_values_are_those_of_eager_ops_bit_for_bit(case: tuple[str, torch.dtype]) -> None:
    """Of all sizes: several chunks, a part of one, a single element. A skipped step in between changes nothing."""
    step, optimizer, part = prepared(KERNELS[case[0]], dtype=case[1])
    tensors = _tensors(optimizer)
    copies = [tensor.detach().clone() for tensor in tensors]
    inverse, coefficient = torch.tensor(0.125), torch.tensor(0.75)
    for flag in (0.0, 1.0, 0.0):
        before = [tensor.detach().clone() for tensor in tensors]
        with forced(Implementation.INTERPRETER):
            bound = step.prepare(StepOptions(True, True))
            assert bound is not None
            bound(torch.tensor(flag), Factors(inverse, coefficient))
        if flag:
            assert_equal(tensors, before)
            continue
        rows = [[copies[place] for place in places] for places in zip(*part.members.columns, strict=True)]
        (numbers,) = part.numbers_by_kind(bound._floats)
        by_eager_ops(part.traced.module, rows, [*numbers, inverse, coefficient, torch.tensor(flag)])
    assert_equal(tensors, copies)


def _tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    from fxamp.optim.reading.layout import read_layout

    return read_layout(optimizer).tensors()


class Applied(Counting):
    """Its step replaces a parameter by what a function computes from it and its gradient."""

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[no-untyped-def, override]
        for parameter in self.param_groups[0]["params"]:
            parameter.copy_(self.param_groups[0]["function"](parameter, parameter.grad))


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda a, b: b.sign(), torch.float32),
        (lambda a, b: b.sgn(), torch.float64),
        (lambda a, b: torch.lerp(a, b, 0.1), torch.float64),
        (lambda a, b: torch.lerp(a, b, 0.9), torch.float64),
    ],
    ids=["sign", "sgn", "lerp from the start", "lerp from the end"],
)
def test_single_ops_are_those_of_torch(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    values, other = torch.tensor([float("nan"), -2.5, -0.0, 0.0, 0.3, float("inf")], dtype=dtype), torch.tensor(0.7)
    parameter = nn.Parameter(other.to(dtype).expand(6).clone())
    parameter.grad = values
    expected = function(parameter.detach().clone(), values)
    optimizer = Applied([parameter])
    optimizer.param_groups[0]["function"] = function
    with forced(Implementation.INTERPRETER):
        fxamp.compile_optimizer(optimizer).step()
        (part,) = parts_of(CompiledOptimizer.of(optimizer))
    assert part.source is not None and "tl.store" in part.source
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-15, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["RMSprop", "SGD"])
def test_ops_on_16_bit_floats_round_once(name: str, dtype: torch.dtype) -> None:
    """As torch's do: a learning rate is no 16-bit float, nor is the square of a gradient, which is inf in float16."""
    results = []
    for compiled in (False, True):
        parameter = nn.Parameter(torch.zeros(64, dtype=dtype))
        optimizer = getattr(torch.optim, name)([parameter], lr=0.003)
        parameter.grad = torch.linspace(1, 400, 64).to(dtype)
        optimizer.step()
        if compiled:
            fxamp.compile_optimizer(optimizer)
        with forced(Implementation.INTERPRETER):
            optimizer.step()
        results.append([parameter.detach(), *(v for v in optimizer.state[parameter].values() if v.dim())])
    assert_equal(*results)


def test_memory_that_is_not_aligned_or_not_contiguous() -> None:
    """Unaligned views and transposed matrices step as others do; their neighbours in memory stay as they are."""
    results = []
    for moved, offset in ((False, 0), (True, 0), (False, 1)):
        storage = torch.zeros(200)
        values = torch.arange(24.0).view(4, 6)
        own = storage[1:25].view(4, 6) if moved else torch.empty(4, 6)
        turned = torch.empty(6, 4).t() if moved else torch.empty(4, 6)
        parameters = [torch.nn.Parameter(own.copy_(values)), torch.nn.Parameter(turned.copy_(values))]
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        for at in range(3):
            for parameter in parameters:
                # A contiguous gradient, whatever the parameter's order is.
                values = torch.arange(24.0).view(4, 6).sub(11.5 + at)
                parameter.grad = torch.empty(25)[offset:][:24].view(4, 6).copy_(values)
            with forced(Implementation.INTERPRETER):
                from fxamp.optim import CompiledOptimizer, StepOptions

                bound = CompiledOptimizer.of(optimizer).prepare(StepOptions(guarded=False))
                if bound is None:
                    optimizer.step()
                else:
                    bound(None, Factors())
        results.append([parameter.detach().contiguous() for parameter in parameters])
        assert storage[25:].eq(0).all() and storage[0] == 0
    for first, *others in zip(*results, strict=True):
        assert all(torch.equal(first, other) for other in others)


def test_a_gradient_at_an_odd_offset_leaves_the_other_tensors_aligned() -> None:
    step = StepKernel.__new__(StepKernel)
    step._flat, step._gradient = np.array([True, True, False]), np.array([False, True, False])
    addresses = np.array([[16, 32, 3], [16, 36, 8], [20, 32, 0], [20, 36, 0]])
    kinds = {aligned: chosen.tolist() for aligned, chosen in step._by_alignment(addresses)}
    assert kinds[Aligned.ALL] == [True, False, False, False]
    assert kinds[Aligned.BUT_GRADIENT] == [False, True, False, False]
    assert kinds[Aligned.NONE] == [False, False, True, True]


@pytest.mark.parametrize("aligned", [Aligned.ALL, Aligned.BUT_GRADIENT])
@pytest.mark.parametrize("arch", exhaustive(ARCHS, always=ARCHS[:1]))
def test_machine_code_has_16_byte_accesses_and_no_spills(arch: str, aligned: Aligned) -> None:
    """Of AdamW, clipped and unscaled: four tensors read and three written, 16 bytes at a time.

    AMD's GPUs read 16 bytes from any multiple of 4, so also from a gradient that is not aligned.
    """
    loads = 8 if aligned is Aligned.ALL or arch.startswith("gfx") else 6
    _, _, part = prepared(OPTIMIZERS["AdamW"])
    gm, inputs = part.traced.module, kernel_inputs(part.traced.module)
    text = step_text(gm, inputs, aligned, step_block(TARGETS[arch].warp_size))
    code = machine_code(NAME, text, step_parameters(gm, inputs), STEP_OPTIONS, arch)
    assert code == MachineCode(wide_loads=loads, wide_stores=6, spills=0)


@pytest.mark.parametrize(("state", "bytes_"), [("float32", 28.0), ("bfloat16", 20.0), ("8bit", 16 + 2 * 2 * 2 / 256)])
def test_bytes_of_the_generated_code(state: str, bytes_: float) -> None:
    """Each tensor of a parameter's size is loaded once and stored once at most.

    Of 8 bits two states have a scale of 2 bytes for 256 elements each, which is read and written.
    """
    policy = Policy.loads(f'extends = ["cpu-bfloat16"]\n[optimizer]\nstate = "{state}"\n')
    optimizer = fxamp.compile_optimizer(OPTIMIZERS["AdamW"]([nn.Parameter(torch.ones(300))]), policy)
    with forced(Implementation.INTERPRETER):
        for _ in range(2):
            optimizer.param_groups[0]["params"][0].grad = torch.ones(300)
            optimizer.step()
    (part,) = parts_of(CompiledOptimizer.of(optimizer))
    gm = part.traced.module
    flat = [node for node in gm.graph.find_nodes(op="placeholder") if node.meta["val"].dim()]
    whole = part.source.partition("elif start < left")[0]
    total = 0.0
    for node, name in kernel_inputs(gm).cells.items():
        if node not in flat or name == "numbers":
            continue
        share = 256 if node.meta["val"].dtype is SCALES else 1
        accesses = len(re.findall(rf"tl\.(?:load|store)\({name}_at \+ (?:offsets|start)", whole))
        assert 1 <= accesses <= 2, name
        total += accesses * node.meta["val"].element_size() / share
    assert total == bytes_


def test_two_launches_for_all_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """One computes the 0-dim values, a program for each parameter, and one steps."""
    from fxamp.kernels import interpreter

    launches: list[tuple[int, ...]] = []
    real = interpreter.Interpreted.__getitem__
    monkeypatch.setattr(interpreter.Interpreted, "__getitem__", lambda s, grid: launches.append(grid) or real(s, grid))
    step, optimizer, _ = prepared(OPTIMIZERS["AdamW"])
    with forced(Implementation.INTERPRETER):
        bound = step.prepare(StepOptions(True, True))
        assert bound is not None
        bound(torch.tensor(0.0), Factors(torch.tensor(1.0), torch.tensor(1.0)))
    assert optimizer is not None and launches == [(len(SHAPES),), (2 + (len(SHAPES) - 1),)]


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_no_thread_of_a_step_computes_in_float64(name: str) -> None:
    _, _, part = prepared(OPTIMIZERS[name])
    gm, inputs = part.traced.module, kernel_inputs(part.traced.module)
    text = step_text(gm, inputs, Aligned.ALL, 1024)
    for line in text.splitlines():
        assert "float64" not in line or ".to(tl.pointer_type(tl.float64)" in line, line


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_tables_are_aligned_for_any_number_of_rows(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles a kernel again for a table that is not aligned to 16 bytes, as its loads can be narrower."""
    from fxamp.kernels import interpreter

    addresses: list[int] = []

    def launch(*arguments: object, **options: object) -> None:
        addresses.extend(argument.data_ptr() for argument in arguments[:2] if isinstance(argument, Tensor))

    monkeypatch.setattr(interpreter.Interpreted, "__getitem__", lambda s, grid: launch)
    parameters = [nn.Parameter(torch.ones(5)) for _ in range(count)]
    optimizer = OPTIMIZERS["AdamW"](parameters)
    with forced(Implementation.INTERPRETER):
        for parameter in parameters:
            parameter.grad = torch.ones(5)
        optimizer.step()
        bound = CompiledOptimizer.of(optimizer).prepare(StepOptions(guarded=False))
        assert bound is not None
        bound(None, Factors())
    assert addresses and all(address % 16 == 0 for address in addresses)


def test_an_op_without_an_expression_keeps_the_whole_step() -> None:
    class Odd(Counting):
        @torch.no_grad()
        def step(self, closure=None):  # type: ignore[no-untyped-def, override]
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(torch.special.i0(parameter.grad))

    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    from fxamp.optim.programs.lowering import WholeStep

    optimizer = Odd([parameter])
    with forced(Implementation.INTERPRETER):
        step = CompiledOptimizer.of(optimizer)
        assert step.prepare(StepOptions()) is not None
    assert [type(part) for part in parts_of(step)] == [WholeStep]
