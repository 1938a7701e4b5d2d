"""Steps that several threads compile, and threads that run something else meanwhile."""

import copy
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from support.oracles.beside_threads import Beside
from torch import nn

import fxamp


def test_other_threads_do_not_notice_that_a_step_is_traced() -> None:
    beside, weight = Beside(), nn.Parameter(torch.ones(3))

    class Visited(torch.optim.SGD):
        """SGD that lets another thread run in the middle of its step."""

        def step(self, closure: Any = None) -> Any:
            beside.run()
            return super().step(closure)

    optimizer = fxamp.compile_optimizer(Visited([weight], lr=0.1, momentum=0.9), lowering="aot_eager")
    for _ in range(2):
        weight.grad = torch.ones(3)
        optimizer.step()
    assert not beside.errors and beside.runs > 2, "the second step was not traced"


def test_compiled_models_run_while_inductor_compiles_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor traces with torch's make_fx, which says to the whole process that fx traces."""
    from torch._inductor import compile_fx
    from torch.fx.experimental.proxy_tensor import make_fx

    beside, weight, inner = Beside(by_torch=True), nn.Parameter(torch.ones(3)), compile_fx.compile_fx_inner

    def visited(*args: Any, **kwargs: Any) -> Any:
        make_fx(lambda x: (beside.run(), x.sin())[1])(torch.ones(2))
        return inner(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", visited)
    optimizer = fxamp.compile_optimizer(torch.optim.AdamW([weight]))
    for _ in range(2):
        weight.grad = torch.ones(3)
        optimizer.step()
    assert not beside.errors and beside.runs


@pytest.mark.parametrize("scaled", [False, True])
def test_threads_that_compile_their_steps_compute_what_one_thread_does(scaled: bool) -> None:
    models = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(4)]
    alone, start, call = copy.deepcopy(models), Barrier(len(models)), nn.Module.__call__
    errors: list[Exception] = []

    def train(model: nn.Module) -> None:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = fxamp.GradScaler("cpu", enabled=scaled, skip="device", step_lowering="aot_eager")
        if not scaled:
            optimizer = fxamp.compile_optimizer(optimizer, lowering="aot_eager")
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(3, 4)).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()

    def work(model: nn.Module) -> None:
        start.wait()
        try:
            train(model)
        except Exception as error:
            errors.append(error)

    threads = [Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and nn.Module.__call__ is call and not torch.compiler.is_compiling()
    for model, other in zip(models, alone, strict=True):
        train(other)
        assert_equal([*model.parameters()], [*other.parameters()])
