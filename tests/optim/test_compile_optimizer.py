"""``compile_optimizer``: the same object, stepping as the eager optimizer does."""

import copy
import logging
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from support.checks.exhaustive import each_once
from support.oracles.guarded_runs import parts_of
from support.programs.every_optimizer import OPTIMIZERS, Make
from support.programs.user_optimizers import Counting, Differencing, OnTheHost, Remembering
from torch import Tensor, nn

import fxamp
from fxamp.errors import OptionError
from fxamp.optim import CompiledOptimizer
from fxamp.tools.bench.host_syncs import HostReads

SHAPES = ((4, 3), (2, 5), (7,), (2, 3, 2))
MAKES: dict[str, Make] = {
    **{name: make for name, make in OPTIMIZERS.items() if name not in ("LBFGS", "Muon")},
    "a user's own": Counting,
    "a user's own, first step unlike the others": Differencing,
    "a user's own, on the host": OnTheHost,
    "a user's own, remembering": Remembering,
}


def parameters(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def give_gradients(params: list[Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def train(
    make: Make, compiled: bool, clip_norm: float | None = None, dtype: torch.dtype = torch.float32, steps: int = 4
) -> torch.optim.Optimizer:
    optimizer = make(parameters(dtype))
    if compiled:
        assert fxamp.compile_optimizer(optimizer, clip_norm=clip_norm, lowering="aot_eager") is optimizer
    own = [p for group in optimizer.param_groups for p in group["params"]]
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(steps):
        give_gradients(own, step)
        if clip_norm is not None and not compiled:
            nn.utils.clip_grad_norm_(own, clip_norm)
        optimizer.step()
        schedule.step()
    return optimizer


def assert_equal_within_rounding(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer, wide: Any) -> None:
    """No further from a float64 run than a few times what the eager run is."""
    for a, b, c in zip(*(optimizer.param_groups[0]["params"] for optimizer in (ours, theirs, wide)), strict=True):
        bound = 4 * (b.double() - c).abs().max() + torch.finfo(a.dtype).eps * (1 + c.abs().max())
        assert (a.double() - c).abs().max() <= bound


@each_once("name, clip_norm", MAKES, [None, 0.5])
def test_every_optimizer_steps_as_it_does_eagerly(name: str, clip_norm: float | None) -> None:
    ours, theirs, wide = (
        train(MAKES[name], compiled, clip_norm, dtype)
        for compiled, dtype in ((True, torch.float32), (False, torch.float32), (False, torch.float64))
    )
    assert_equal_within_rounding(ours, theirs, wide)
    ours_state, theirs_state = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert [*ours_state] == [*theirs_state]
    for at, entry in theirs_state.items():
        for key, value in entry.items():
            assert type(ours_state[at][key]) is type(value) or isinstance(ours_state[at][key], Tensor)
            torch.testing.assert_close(
                torch.as_tensor(ours_state[at][key]), torch.as_tensor(value), rtol=1e-5, atol=1e-6, check_dtype=False
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_of_other_dtypes(dtype: torch.dtype) -> None:
    ours, theirs, wide = (
        train(OPTIMIZERS["AdamW"], c, None, d) for c, d in ((True, dtype), (False, dtype), (False, torch.float64))
    )
    assert_equal_within_rounding(ours, theirs, wide)


def test_a_float64_parameter_without_dimensions_steps_in_float64() -> None:
    values = []
    for compiled in (True, False):
        parameter = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        optimizer = torch.optim.AdamW([parameter], lr=0.1)
        if compiled:
            fxamp.compile_optimizer(optimizer, lowering="aot_eager")
        for step in range(4):
            give_gradients([parameter], step)
            optimizer.step()
        values.append(parameter.detach())
    torch.testing.assert_close(*values, rtol=1e-14, atol=0.0)


@pytest.mark.inductor
def test_inductor_compiles_one_program_for_all_shapes() -> None:
    ours, theirs = parameters(), parameters()
    compiled, eager = torch.optim.AdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    fxamp.compile_optimizer(compiled)
    for step in range(3):
        for params in (ours, theirs):
            give_gradients(params, step)
        compiled.step()
        eager.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert len(parts_of(CompiledOptimizer.of(compiled))) == 1


def test_a_step_reads_nothing_on_the_host_and_leaves_gradients_alone() -> None:
    optimizer = train(OPTIMIZERS["AdamW"], True, 0.5)
    own = optimizer.param_groups[0]["params"]
    give_gradients(own, 9)
    before = [parameter.grad.clone() for parameter in own]
    with HostReads() as reads:
        optimizer.step()
    assert reads.count == 0
    assert all(torch.equal(parameter.grad, b) for parameter, b in zip(own, before, strict=True))


@pytest.mark.parametrize("lowering", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_backward_through_weights_that_a_step_has_changed_is_refused(lowering: str | None) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    if lowering is not None:
        fxamp.compile_optimizer(optimizer, lowering=lowering)
    for step in range(3):
        loss = weight.square().sum()
        weight.grad = torch.ones(3)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        assert weight._version > step


def test_a_closure_is_called_once_before_the_step_and_its_loss_returned() -> None:
    own = parameters()
    optimizer = fxamp.compile_optimizer(torch.optim.AdamW(own), lowering="aot_eager")
    calls: list[bool] = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in own)
        loss.backward()  # type: ignore[union-attr]
        return loss  # type: ignore[return-value]

    losses = [optimizer.step(closure).item() for _ in range(3)]  # type: ignore[arg-type]
    assert calls == [True] * 3 and losses[0] > losses[1] > losses[2]
    assert CompiledOptimizer.of(optimizer).compilations == 1


def test_a_users_own_step_gets_its_closure() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure=None):  # type: ignore[no-untyped-def, override]
            for _ in range(2):
                with torch.enable_grad():
                    closure()
                super().step()

    own = parameters()
    optimizer = fxamp.compile_optimizer(Twice(own, lr=0.1), lowering="aot_eager")
    calls: list[int] = []

    def closure() -> None:
        calls.append(1)
        give_gradients(own, 0)

    optimizer.step(closure)  # type: ignore[arg-type]
    assert len(calls) == 2


def test_hooks_are_called_once_a_step() -> None:
    optimizer = OPTIMIZERS["AdamW"](parameters())
    fxamp.compile_optimizer(optimizer, lowering="aot_eager")
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    for step in range(3):
        give_gradients(optimizer.param_groups[0]["params"], step)
        optimizer.step()
    assert calls == ["pre", "post"] * 3


def test_a_scheduler_may_come_before_or_after() -> None:
    results = []
    for late in (False, True):
        own = parameters()
        optimizer = torch.optim.AdamW(own, lr=0.1)
        if not late:
            fxamp.compile_optimizer(optimizer, lowering="aot_eager")
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        if late:
            fxamp.compile_optimizer(optimizer, lowering="aot_eager")
        for step in range(3):
            give_gradients(own, step)
            optimizer.step()
            schedule.step()
        assert CompiledOptimizer.of(optimizer).compilations == 1
        results.append(own)
    assert_equal(*results)


def test_no_gradients_no_step() -> None:
    optimizer = fxamp.compile_optimizer(torch.optim.AdamW(parameters()), clip_norm=1.0, lowering="aot_eager")
    assert optimizer.step() is None and not optimizer.state  # type: ignore[call-arg]


@pytest.mark.parametrize("skip", ["host", "device"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_steps_a_compiled_optimizer_that_clips(skip: str, fused: bool) -> None:
    """Whoever steps, the gradients are clipped, and an overflow skips."""
    results = []
    for ours in (True, False):
        own = parameters()
        optimizer = torch.optim.AdamW(own, lr=0.1, fused=fused)
        if ours:
            fxamp.compile_optimizer(optimizer, clip_norm=0.5, lowering="aot_eager")
            scaler: Any = fxamp.GradScaler("cpu", init_scale=8.0, skip=skip, step_lowering="aot_eager")
        else:
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(5):
            give_gradients(own, step)
            scaler.scale(torch.zeros(()))
            for parameter in own:
                assert parameter.grad is not None
                parameter.grad *= 8.0 if step < 3 else 4.0
            if step == 2:
                own[0].grad[0] = float("inf")  # type: ignore[index]
            if not ours:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(own, 0.5)
            scaler.step(optimizer)
            scaler.update()
        results.append(own)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_a_copy_is_an_ordinary_optimizer() -> None:
    optimizer = train(OPTIMIZERS["AdamW"], True)
    other = copy.deepcopy(optimizer)
    assert "step" not in vars(other)
    own = other.param_groups[0]["params"]
    give_gradients(own, 7)
    give_gradients(optimizer.param_groups[0]["params"], 7)
    other.step()
    optimizer.step()
    torch.testing.assert_close(own, optimizer.param_groups[0]["params"], rtol=1e-5, atol=1e-6)


def test_the_log_names_parameters_without_their_own_program(caplog: pytest.LogCaptureFixture) -> None:
    own = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.tensor(1.0))]
    optimizer = fxamp.compile_optimizer(torch.optim.AdamW(own), lowering="aot_eager")
    with caplog.at_level(logging.INFO, logger="fxamp.optim"):
        for step in range(3):
            give_gradients(own, step)
            optimizer.step()
    (record,) = [r for r in caplog.records if "do not share a program" in r.message]
    assert "1 of 2" in record.message and "no dimension" in record.message


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"lowering": "inducter"}, "did you mean 'inductor'"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0: expected a non-negative number"),
        ({"clip_norm": True}, "clip_norm=True"),
    ],
)
def test_a_wrong_argument_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as raised:
        fxamp.compile_optimizer(torch.optim.AdamW(parameters()), **arguments)
    assert message in str(raised.value)
    with pytest.raises(OptionError, match=r"expected a torch\.optim\.Optimizer, got list"):
        fxamp.compile_optimizer([])  # type: ignore[arg-type]
