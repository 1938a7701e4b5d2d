"""A policy's ``[optimizer]``: state in fewer bits, rounded as asked, saved and loaded as ordinary state."""

import copy
import io
import logging
import random
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from support.checks.exhaustive import each_once, exhaustive
from support.machines.machine_code import ARCHS, TARGETS, machine_code
from support.oracles.guarded_runs import parts_of
from support.programs.every_optimizer import OPTIMIZERS
from support.programs.user_optimizers import Counting
from torch import Tensor, nn

import fxamp
from fxamp.errors import OptionError, UnsupportedOpError
from fxamp.kernels import Implementation, forced
from fxamp.optim import CompiledOptimizer, packed_state_dict
from fxamp.optim.kernels.launch_size import STEP_OPTIONS, step_block
from fxamp.optim.kernels.step_triton import NAME, Aligned, step_parameters, step_text
from fxamp.optim.packed_tensor import PackedTensor
from fxamp.optim.programs.kind_step import kernel_inputs
from fxamp.optim.reading.layout import optimized_parameters as parameters
from fxamp.policy import Policy

SHAPES = ((9, 40), (5,), (300,), (1,))
TABLES = {
    "bfloat16": 'state = "bfloat16"',
    "bfloat16 stochastic": 'state = "bfloat16"\nrounding = "stochastic"',
    "8bit": 'state = "8bit"',
    "8bit stochastic": 'state = "8bit"\nrounding = "stochastic"',
    "float8": 'state = "float8_e4m3fn"',
    "by name": 'state = { exp_avg = "8bit", exp_avg_sq = "bfloat16" }',
}
#: How far a state may be from what was rounded, relative to the largest of its block.
STEPS = {"bfloat16": 2**-7, "s3m4": 2**-4, "u5m3": 2**-3, "e4m3fn": 2**-3}


def policy(table: str) -> Policy:
    return Policy.loads(f'extends = ["cpu-bfloat16"]\n[optimizer]\n{table}\n')


def packing(
    table: str | None, make: Any = OPTIMIZERS["AdamW"], dtype: torch.dtype = torch.float32, lowering: str = "aot_eager"
) -> torch.optim.Optimizer:
    generator = torch.Generator().manual_seed(0)
    own = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    optimizer: torch.optim.Optimizer = make(own)
    return fxamp.compile_optimizer(optimizer, None if table is None else policy(table), lowering=lowering)


def step(optimizer: torch.optim.Optimizer, *seeds: int) -> torch.optim.Optimizer:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for parameter in parameters(optimizer):
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()
    return optimizer


def states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    entries = [optimizer.state[parameter] for parameter in parameters(optimizer)]
    return [value for entry in entries for value in entry.values()]


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_machine_code_of_8_bit_state_spills_nothing_to_memory(dtype: torch.dtype, arch: str) -> None:
    with forced(Implementation.INTERPRETER):
        optimizer = step(packing(TABLES["8bit stochastic"], dtype=dtype, lowering="inductor"), 0, 1)
    (part,) = parts_of(CompiledOptimizer.of(optimizer))
    gm = part.traced.module
    inputs = kernel_inputs(gm)
    for aligned in (Aligned.ALL, Aligned.BUT_GRADIENT):
        text = step_text(gm, inputs, aligned, step_block(TARGETS[arch].warp_size))
        code = machine_code(NAME, text, step_parameters(gm, inputs), STEP_OPTIONS, arch)
        assert code.spills == 0
        assert code.wide_loads and code.wide_stores


@pytest.mark.parametrize("name", TABLES)
def test_one_step_from_the_same_state_differs_by_one_rounding_of_the_state(name: str) -> None:
    """The plain optimizer goes on from what the packed one reads: parameters agree, state within a step of its form."""
    ours = step(packing(TABLES[name]), 0, 1)
    theirs = torch.optim.AdamW([nn.Parameter(p.detach().clone()) for p in parameters(ours)], **_arguments(ours))
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    for optimizer in (ours, theirs):
        step(optimizer, 2)
    torch.testing.assert_close(parameters(ours), parameters(theirs), rtol=1e-6, atol=1e-6)
    for mine, plain in zip(states(ours), states(theirs), strict=True):
        if not isinstance(plain, Tensor):
            assert plain == mine - 1, "what counts draws, which the plain one does not make"
            continue
        if not isinstance(mine, PackedTensor):
            torch.testing.assert_close(mine, plain)
            continue
        bound = STEPS[mine.form] * plain.abs().clamp(min=float(plain.abs().max()) * 2**-6)
        assert ((mine.unpacked() - plain).abs() <= bound).all()


def _arguments(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: optimizer.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}


@pytest.mark.parametrize(("name", "first"), [("8bit", "s3m4"), ("float8", "e4m3fn")])
def test_second_moments_have_no_sign_and_small_bytes(name: str, first: str) -> None:
    optimizer = step(packing(TABLES[name]), 0, 1)
    entry = optimizer.state[parameters(optimizer)[0]]
    assert (entry["exp_avg"].form, entry["exp_avg_sq"].form) == (first, "u5m3")
    count = parameters(optimizer)[0].numel()
    assert sum(part.nbytes for part in entry["exp_avg"].parts) == count + 2 * -(-count // 256)
    assert type(entry["step"]) is Tensor


@each_once("name, make", ["8bit", "float8"], ["AdamW", "NAdam", "RMSprop"])
def test_a_second_moment_does_not_become_zero_before_the_first_one(name: str, make: str) -> None:
    """Elements with rare gradients among others: a step that divides by the root of 0 throws the parameter away."""
    largest = []
    for table in (TABLES[name], None):
        own = nn.Parameter(torch.zeros(256))
        optimizer = getattr(torch.optim, make)([own], lr=1e-3, foreach=False)
        fxamp.compile_optimizer(optimizer, None if table is None else policy(table), lowering="aot_eager")
        moved = []
        for at in range(20):
            before = own.detach().clone()
            often = torch.arange(256) % 16 > 0
            own.grad = torch.linspace(0.1, 2, 256) * (often | (at % 16 == 1)) * torch.where(often, 1.0, 1e-3)
            optimizer.step()
            moved.append((own.detach() - before).abs().max())
        largest.append(torch.stack(moved).max())
    assert largest[0] < 2 * largest[1]


@pytest.mark.parametrize("name", ["bfloat16 stochastic", "8bit stochastic"])
def test_states_whose_difference_is_under_a_root_are_not_rounded(name: str) -> None:
    """Where gradients stay the same, the mean of squares is hardly above the squared mean: rounded, it is below."""
    results = []
    for table in (TABLES[name], None):
        own = nn.Parameter(torch.zeros(256))
        optimizer = torch.optim.RMSprop([own], lr=1e-3, alpha=0.5, centered=True, momentum=0.5)
        fxamp.compile_optimizer(optimizer, None if table is None else policy(table), lowering="aot_eager")
        for _ in range(12):
            own.grad = torch.linspace(0.1, 2, 256)
            optimizer.step()
        packed = {key for key, value in optimizer.state[own].items() if isinstance(value, PackedTensor)}
        assert packed == (set() if table is None else {"momentum_buffer"})
        results.append(own.detach())
    torch.testing.assert_close(*results, rtol=0.1, atol=0.0)


@pytest.mark.parametrize(
    ("name", "dtype", "how"),
    [
        ("bfloat16 stochastic", torch.float32, Implementation.INTERPRETER),
        ("8bit stochastic", torch.bfloat16, Implementation.INTERPRETER),
        pytest.param("by name", torch.float32, Implementation.INTERPRETER, marks=pytest.mark.exhaustive),
        pytest.param("8bit", torch.float32, None, marks=pytest.mark.exhaustive),
    ],
)
def test_generated_code_keeps_the_same_bits(name: str, dtype: torch.dtype, how: Implementation | None) -> None:
    """The kernel in Triton's interpreter, and what Inductor makes of the step on this CPU."""
    ours = step(packing(TABLES[name], dtype=dtype), 0, 1, 2)
    with forced(how):
        generated = step(packing(TABLES[name], dtype=dtype, lowering="inductor"), 0, 1, 2)
    for a, b in zip(states(ours), states(generated), strict=True):
        if isinstance(a, PackedTensor):
            assert isinstance(b, PackedTensor) and a.form == b.form
            # torch's own composites, which "aot_eager" runs, may round once less.
            assert (a.unpacked() != b.unpacked()).float().mean() < 0.02
    torch.testing.assert_close(
        parameters(ours), parameters(generated), rtol=1e-6 if dtype is torch.float32 else 2**-7, atol=1e-6
    )


@each_once("skip, name", ["host", "device"], exhaustive(TABLES, always=list(TABLES)[::2]))
def test_a_skipped_step_changes_no_bit(name: str, skip: str) -> None:
    optimizer = step(packing(TABLES[name]), 0, 1)
    scaler = fxamp.GradScaler("cpu", skip=skip, step_lowering="aot_eager")
    scaler.scale(torch.zeros(()))
    before = copy.deepcopy([part for value in states(optimizer) for part in getattr(value, "parts", (value,))])
    weights = [parameter.detach().clone() for parameter in parameters(optimizer)]
    parameters(optimizer)[2].grad[7] = float("inf")  # type: ignore[index]
    scaler.step(optimizer)
    scaler.update()
    after = [part for value in states(optimizer) for part in getattr(value, "parts", (value,))]
    assert scaler.skipped_steps == 1
    assert_equal(after, before)
    assert_equal(parameters(optimizer), weights)


@pytest.mark.exhaustive
@pytest.mark.parametrize("table", ['state = "8bit"\nrounding = "stochastic"\nweights = "kahan"', 'state = "float32"'])
def test_a_thousand_overflows_change_no_bit(table: str) -> None:
    """Of 16-bit weights, what their rounding lost, state and counters; the steps between them are taken."""
    optimizer = step(packing(table, dtype=torch.bfloat16), 0, 1)
    scaler = fxamp.GradScaler("cpu", init_scale=1.0, min_scale=1.0, skip="device", step_lowering="aot_eager")
    scaler.scale(torch.zeros(()))
    chance = random.Random(0)

    def bits() -> list[Tensor]:
        held = [part for value in states(optimizer) for part in getattr(value, "parts", (value,))]
        return [tensor.detach().clone() for tensor in (*held, *parameters(optimizer))]

    for at in range(1000):
        before = bits()
        gradient = chance.choice(parameters(optimizer)).grad
        assert gradient is not None
        copy_before, place = gradient.clone(), chance.randrange(gradient.numel())
        gradient.view(-1)[place] = chance.choice([float("inf"), float("-inf"), float("nan")])
        scaler.step(optimizer)
        scaler.update()
        assert_equal(bits(), before)
        gradient.copy_(copy_before)
        if at % 100 == 0:
            scaler.step(optimizer)
            scaler.update()
            assert not all(map(torch.equal, bits(), before))
    assert scaler.skipped_steps == 1000 and CompiledOptimizer.of(optimizer).reasons == ()


def test_saved_state_is_ordinary_and_loads_either_way() -> None:
    ours = step(packing(TABLES["8bit"]), 0, 1)
    saved, packed = ours.state_dict(), packed_state_dict(ours)
    assert all(type(v) is Tensor for entry in saved["state"].values() for v in entry.values())
    assert type(packed["state"][0]["exp_avg"]) is PackedTensor
    stream = io.BytesIO()
    torch.save(packed, stream)
    stream.seek(0)
    packed = torch.load(stream, weights_only=False)
    packed_count = sum(isinstance(value, PackedTensor) for value in states(ours))
    for source in (copy.deepcopy(saved), packed):
        fresh = packing(TABLES["8bit"])
        fresh.load_state_dict(source)
        for parameter, value in zip(parameters(fresh), parameters(ours), strict=True):
            parameter.data.copy_(value)
        step(fresh, 5)
        assert sum(isinstance(value, PackedTensor) for value in states(fresh)) == packed_count
        plain = torch.optim.AdamW([nn.Parameter(p.detach().clone()) for p in parameters(ours)], **_arguments(ours))
        plain.load_state_dict(copy.deepcopy(saved))
        step(plain, 5)
        torch.testing.assert_close(parameters(fresh), parameters(plain), rtol=1e-6, atol=1e-6)


def test_random_bits_come_from_the_seed_and_the_step_alone() -> None:
    first, second = (step(packing(TABLES["8bit stochastic"]), 0, 1, 2) for _ in range(2))
    assert_equal(parameters(first), parameters(second))
    other = packing(None)
    fxamp.compile_optimizer(other, policy(TABLES["8bit stochastic"]), lowering="aot_eager", seed=1)
    step(other, 0, 1, 2)
    different = [not torch.equal(a, b) for a, b in zip(parameters(first), parameters(other), strict=True)]
    assert any(different)


def test_a_step_that_the_optimizer_takes_itself_finds_ordinary_state() -> None:
    """As a copy does, which is an ordinary optimizer. It reads what it has rounded, so it is less exact."""
    optimizer = step(packing(TABLES["8bit"]), 0, 1)
    other = copy.deepcopy(optimizer)
    assert any(isinstance(value, PackedTensor) for value in states(other))
    step(other, 2)
    step(optimizer, 2)
    torch.testing.assert_close(parameters(optimizer), parameters(other), rtol=0, atol=1e-4)


def test_another_policy_takes_what_was_packed() -> None:
    optimizer = step(packing(TABLES["8bit"]), 0, 1)
    fxamp.compile_optimizer(optimizer, policy(TABLES["bfloat16"]), lowering="aot_eager")
    step(optimizer, 2)
    assert {value.form for value in states(optimizer) if isinstance(value, PackedTensor)} == {"bfloat16"}
    fxamp.compile_optimizer(optimizer, lowering="aot_eager")
    step(optimizer, 3)
    assert not any(isinstance(value, PackedTensor) for value in states(optimizer))


@pytest.mark.parametrize("weights", ["as-is", "kahan"])
@pytest.mark.parametrize("momentum", exhaustive([0.5, 0], always=[0.5]))
@pytest.mark.parametrize(
    "how",
    exhaustive(
        product(["aot_eager", "inductor", "interpreter"], ["nearest", "stochastic"]),
        always=[("aot_eager", "nearest"), ("aot_eager", "stochastic"), ("inductor", "nearest")],
    ),
)
def test_small_updates_of_16_bit_weights(weights: str, momentum: float, how: tuple[str, str]) -> None:
    """A hundred updates of a thousandth each: nearest rounding loses them all, the others do not."""
    lowering, rounding = how
    own = [nn.Parameter(torch.ones(2000, dtype=torch.bfloat16))]
    optimizer = torch.optim.SGD(own, lr=1e-3 if momentum else 2e-3, momentum=momentum)
    table = f'rounding = "{rounding}"\nweights = "{weights}"'
    fxamp.compile_optimizer(optimizer, policy(table), lowering="aot_eager" if lowering == "aot_eager" else "inductor")
    with forced(Implementation.INTERPRETER) if lowering == "interpreter" else nullcontext():
        for _ in range(100):
            own[0].grad = torch.full((2000,), 0.5, dtype=torch.bfloat16)
            optimizer.step()
    moved = 1 - own[0].detach().double().mean().item()
    lossless = weights == "kahan" or rounding == "stochastic"
    assert moved == pytest.approx(0.099, rel=0.05) if lossless else moved == 0


def test_what_cannot_be_packed_is_refused_by_name() -> None:
    for table, message in (
        ('state = { step = "8bit" }', "optimizer.state.step = '8bit': it is a counter"),
        ('state = { exp_avgs = "8bit" }', "no such state .*did you mean 'exp_avg'"),
    ):
        with pytest.raises(OptionError, match=message):
            step(packing(table), 0, 1)


def test_parameters_without_a_program_keep_their_state_and_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    own = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.tensor(1.0))]
    optimizer = fxamp.compile_optimizer(torch.optim.AdamW(own), policy('state = "8bit"'), lowering="aot_eager")
    with caplog.at_level(logging.WARNING, logger="fxamp.optim"):
        step(optimizer, 0, 1, 2)
    assert [type(optimizer.state[p]["exp_avg"]) for p in own] == [PackedTensor, Tensor]
    assert len([r for r in caplog.records if "stays as it is" in r.message]) == 1


@pytest.mark.parametrize("name", exhaustive(["SGD", "RMSprop", "Adagrad", "NAdam", "Rprop"], always=["SGD"]))
def test_other_optimizers_and_a_users_own(name: str) -> None:
    for make in (OPTIMIZERS[name], Counting):
        ours, plain = (step(packing(table, make), 0, 1, 2) for table in ('state = "bfloat16"', None))
        assert CompiledOptimizer.of(ours).compilations >= 1
        for a, b in zip(parameters(ours), parameters(plain), strict=True):
            assert (a - b).abs().max() <= 0.05 * (1 + b.abs().max())


def test_packed_state_reads_and_writes_as_a_tensor() -> None:
    value = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)).t()
    for form in ("bfloat16", "s3m4"):
        packed = PackedTensor.of(value, form)
        assert packed.shape == value.shape and packed.stride() == value.stride() and "PackedTensor" in repr(packed)
        before = packed.unpacked()
        packed.mul_(0.5)
        torch._foreach_mul_([packed], 2.0)
        assert torch.equal(packed.unpacked(), before) and type(packed + 0) is Tensor
        with pytest.raises(UnsupportedOpError, match="unpacked"):
            packed.view(-1)


@pytest.mark.parametrize("form", ["bfloat16", "s3m4"])
def test_what_is_assigned_to_the_data_of_packed_state_is_stored(form: str) -> None:
    packed = PackedTensor.of(torch.zeros(3, 4), form)
    values = torch.linspace(-1, 1, 12).view(4, 3).t()
    packed.data = values
    assert torch.equal(packed.unpacked(), PackedTensor.of(values.contiguous(), form).unpacked())
    packed.data = packed.data * 0
    assert not packed.unpacked().any()
    with pytest.raises(UnsupportedOpError, match=r"torch.float64 \[3, 4\] was assigned .* accepted: torch.float32"):
        packed.data = values.double()
    for change in (lambda: packed.t_(), lambda: packed.unsqueeze_(0), lambda: packed.view(-1)):
        with pytest.raises(UnsupportedOpError, match="would be a view"):
            change()
