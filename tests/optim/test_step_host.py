"""What the host does for a compiled step on a GPU, counted in the interpreter's launches with the kernel left out."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from fxamp.kernels import Implementation, forced
from fxamp.optim.reading.snapshot import Snapshot
from fxamp.tools.bench.host.steps import count_calls

pytest.importorskip("triton")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """The arguments of every launch; no kernel runs."""
    from fxamp.kernels import interpreter

    arguments: list[tuple[Any, ...]] = []

    def launcher(self: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *tensors, **options: arguments.append((grid, *tensors))

    monkeypatch.setattr(interpreter.Interpreted, "__getitem__", launcher)
    with forced(Implementation.INTERPRETER):
        yield arguments


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a table was sent to the device, and blocks were counted."""
    from fxamp.kernels import launch, launch_plan
    from fxamp.optim.kernels import launch as step_launch

    counts: Counter[str] = Counter()

    def counting(module: Any, name: str) -> None:
        original = getattr(module, name)

        def counted(*args: Any) -> Any:
            counts[f"{module.__name__}.{name}"] += 1
            return original(*args)

        monkeypatch.setattr(module, name, counted)

    for module, name in ((launch, "_uploaded"), (launch_plan, "block_map")):
        counting(module, name)
    for name in ("_uploaded", "block_map"):
        counting(step_launch, name)
    return counts


def adamw(count: int, clip_norm: float | None = 1.0) -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.ones(4, 4)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones(4, 4)
    optimizer = fxamp.compile_optimizer(torch.optim.AdamW(parameters, lr=1e-3), clip_norm=clip_norm)
    for _ in range(3):
        optimizer.step()
    return optimizer


def move_gradients(optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones(4, 4)


def calls_for_each(many: int, few: int) -> int:
    """Calls for each of the 100 parameters that make the difference, rounded: collisions in a table add some."""
    return round((many - few) / 100)


@pytest.mark.parametrize("moved", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_step_makes_no_calls_for_each_parameter(moved: bool, launches: list[Any]) -> None:
    """Also where the gradients are at other addresses."""
    few, many = adamw(10), adamw(110)
    for optimizer in (few, many) if moved else ():
        move_gradients(optimizer)
    assert calls_for_each(count_calls(many.step), count_calls(few.step)) == 0


def test_a_step_where_nothing_has_moved_reads_no_columns(launches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It compares the addresses once, and launches."""
    from fxamp.optim.kernels.launch import StepKernel

    optimizer, columns = adamw(3), list[Any]()
    monkeypatch.setattr(StepKernel, "__call__", lambda self, *arguments: columns.append(arguments))
    launches.clear()
    optimizer.step()
    assert launches and not columns
    move_gradients(optimizer)
    optimizer.step()
    assert columns


def test_tables_are_sent_when_a_gradient_moves_and_blocks_never_again(
    launches: list[Any], tables: Counter[str]
) -> None:
    optimizer = adamw(3)
    tables.clear()
    optimizer.step()
    assert not tables
    move_gradients(optimizer)
    optimizer.step()
    assert tables == {"fxamp.kernels.launch._uploaded": 1, "fxamp.optim.kernels.launch._uploaded": 1}


def test_the_table_names_the_gradients_of_this_step(launches: list[Any]) -> None:
    optimizer = adamw(3, clip_norm=None)
    move_gradients(optimizer)
    launches.clear()
    optimizer.step()
    tables = [table for _, table, *_ in launches]
    assert len(tables) == 2  # of the kernel for 0-dim values, and of the step
    table = tables[0]
    assert all(argument is table for argument in tables)
    parameters = optimizer.param_groups[0]["params"]
    rows = table.view(3, -1).tolist()
    assert [row[:2] for row in rows] == [[p.data_ptr(), p.grad.data_ptr()] for p in parameters]


def test_a_hook_that_moves_a_parameter_moves_what_the_step_writes_to(launches: list[Any]) -> None:
    optimizer = adamw(3)
    (parameter, *_) = optimizer.param_groups[0]["params"]
    optimizer.register_step_pre_hook(lambda *_: setattr(parameter, "data", torch.ones(4, 4)))
    optimizer.step()
    _, table, *_ = launches[-1]
    assert table.view(3, -1)[0, 0] == parameter.data_ptr()


def clipped_by_scaler(optimizer: torch.optim.Optimizer) -> fxamp.GradScaler:
    """A scaler that has clipped, before the optimizer's next step; earlier steps were compiled."""
    scaler = fxamp.GradScaler("cpu", init_scale=8.0, skip="device")
    for at in range(4):
        scaler.scale(torch.ones(()))
        scaler.clip_grad_norm_(optimizer, 1.0)
        if at < 3:
            scaler.step(optimizer)
            scaler.update()
    return scaler


def plain_adamw(count: int) -> torch.optim.Optimizer:
    """It has its state: without one the first step would depend on a norm, which no kernel computes."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(4, 4)) for _ in range(count)], lr=1e-3)
    move_gradients(optimizer)
    optimizer.step()
    return optimizer


def test_a_scaler_s_clip_and_step_read_the_optimizer_once(launches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = plain_adamw(3)
    scaler = clipped_by_scaler(optimizer)
    scaler.step(optimizer)
    scaler.update()
    taken, original = [], Snapshot.__init__
    monkeypatch.setattr(
        Snapshot, "__init__", lambda self, own, counted: (taken.append(own), original(self, own, counted))[1]
    )
    scaler.scale(torch.ones(()))
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    assert len(taken) == 1


@pytest.mark.exhaustive
def test_a_scaler_s_clip_and_step_make_few_calls_for_each_parameter(launches: list[Any]) -> None:
    def counted(count: int) -> int:
        optimizer = plain_adamw(count)
        scaler = clipped_by_scaler(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scaler.scale(torch.ones(()))
        return count_calls(lambda: (scaler.clip_grad_norm_(optimizer, 1.0), scaler.step(optimizer)))

    assert calls_for_each(counted(110), counted(10)) <= 2


def test_a_gradient_replaced_between_clip_and_step_is_the_one_that_the_kernel_reads(launches: list[Any]) -> None:
    optimizer = plain_adamw(3)
    scaler = clipped_by_scaler(optimizer)
    old = [parameter.grad for parameter in optimizer.param_groups[0]["params"]]
    move_gradients(optimizer)
    scaler.step(optimizer)
    _, table, *_ = launches[-1]
    rows = table.view(3, -1).tolist()
    assert [row[1] for row in rows] == [p.grad.data_ptr() for p in optimizer.param_groups[0]["params"]]
    assert not {row[1] for row in rows} & {gradient.data_ptr() for gradient in old}


BETWEEN: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "nothing": lambda own: None,
    "a gradient replaced": lambda own: setattr(own.param_groups[0]["params"][0], "grad", torch.full((4, 4), 3.0)),
    "no gradient": lambda own: setattr(own.param_groups[0]["params"][0], "grad", None),
    "a sparse gradient": lambda own: setattr(
        own.param_groups[0]["params"][0], "grad", torch.full((4, 4), 3.0).to_sparse(1)
    ),
    "data replaced": lambda own: setattr(own.param_groups[0]["params"][0], "data", torch.full((4, 4), 2.0)),
    "another rate": lambda own: own.param_groups[0].update(lr=0.5),
    "another group": lambda own: own.param_groups[1]["params"].insert(0, own.param_groups[0]["params"].pop()),
    "another momentum": lambda own: own.state[own.param_groups[0]["params"][0]].update(
        momentum_buffer=torch.ones(4, 4)
    ),
    "momentum in place": lambda own: own.state[own.param_groups[0]["params"][0]]["momentum_buffer"].mul_(3),
}


@pytest.mark.parametrize("change", BETWEEN)
def test_what_changes_between_clip_and_step_counts_for_the_step(change: str) -> None:
    """torch's SGD takes what is there when it steps: gradients over the scale, times the coefficient of the clip."""
    results = []
    for compiled in (True, False):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(4, 4)) for _ in range(3)]
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.2}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=False)
        scaler = fxamp.GradScaler("cpu", init_scale=8.0, skip="device", step_lowering="aot_eager")
        for step in range(4):
            for parameter in parameters:
                parameter.grad = torch.randn(4, 4) * 8
            squares = [(parameter.grad / 8).square().sum() for parameter in parameters if parameter.grad is not None]
            factor = torch.clamp(0.5 / (torch.stack(squares).sum().sqrt() + 1e-6), max=1.0)
            if compiled:
                scaler.scale(torch.ones(()))
                scaler.clip_grad_norm_(optimizer, 0.5)
            if step == 3:
                BETWEEN[change](optimizer)
            if compiled:
                scaler.step(optimizer)
                scaler.update()
                continue
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad / 8 * factor
            optimizer.step()
        results.append([*parameters, *(optimizer.state[p]["momentum_buffer"] for p in parameters)])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        lambda p: setattr(p, "data", p.data.clone()),
        lambda p: setattr(p, "data", p.data.double()),
        lambda p: setattr(p, "data", p.data.t().contiguous().t()),
        lambda p: setattr(p, "grad", None),
        lambda p: setattr(p, "grad", p.grad.t().contiguous().t()),
    ],
    ids=["data moved", "data in another dtype", "data in another order", "no gradient", "gradient in another order"],
)
def test_what_changes_between_steps_is_noticed(change: Callable[[Tensor], None]) -> None:
    """Each step equals the optimizer's own after a parameter or its gradient was replaced in place."""
    values, gradients = torch.randn(3, 4, 4), torch.randn(3, 4, 4)
    results = []
    for compiled in (True, False):
        parameters = [nn.Parameter(value.clone()) for value in values]
        optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1, foreach=False)
        if compiled:
            fxamp.compile_optimizer(optimizer, lowering="aot_eager")
        for step in range(4):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = (gradient * (step + 1)).to(parameter.dtype)
            if step == 3 and "grad" in change.__code__.co_consts:
                change(parameters[1])
            elif step == 2 and "data" in change.__code__.co_consts:
                change(parameters[1])
                parameters[1].grad = gradients[1].to(parameters[1].dtype)
            optimizer.step()
        results.append(parameters)
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
