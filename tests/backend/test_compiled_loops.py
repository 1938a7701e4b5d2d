"""A training loop's body as one compiled function: the scaler stays out of its graphs, the numbers stay the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exhaustive import each_once
from scaled_runs import compile_scaled, scaler
from torch import Tensor, nn

import fxamp

INF = float("inf")
STEPS = 5

Loop = Callable[[nn.Module, Tensor, torch.optim.Optimizer, Any], Any]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def plain(net: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer, given: Any) -> Tensor:
    loss = net(x).float().square().mean()
    given.scale(loss).backward()
    given.step(optimizer)
    given.update()
    optimizer.zero_grad()
    return loss


def clipped(net: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer, given: Any) -> tuple[Tensor, Tensor]:
    loss = net(x).float().square().mean()
    given.scale(loss).backward()
    given.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
    given.step(optimizer)
    given.update()
    optimizer.zero_grad()
    return loss, norm


def accumulated(net: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer, given: Any) -> Tensor:
    for part in x.chunk(2):
        loss = net(part).float().square().mean() / 2
        given.scale(loss).backward()
    given.step(optimizer)
    given.update()
    optimizer.zero_grad()
    return loss


def run(loop: Loop, given: Any, compiled: Any = None) -> tuple[list[Tensor], list[Any]]:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    step = loop if compiled is None else compiled(loop)
    results, scales = [], []
    for number in range(STEPS):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(number))
        if number == 2:
            x[0] = INF
        with torch.autocast("cpu", torch.float16, enabled=compiled is None):
            results.append(step(net, x, optimizer, given))
        scales.append(getattr(given, "loss_scale", None) or given.get_scale())
    return [p.detach() for p in net.parameters()], [results, scales]


@each_once("attached, loop", [True, False], [plain, clipped, accumulated])
def test_the_loop_trains_as_autocast_with_torchs_scaler_does(loop: Loop, attached: bool) -> None:
    wanted, told = run(loop, torch.amp.GradScaler("cpu", init_scale=2.0**8))
    given = scaler()
    options: dict[str, Any] = {"policy": "cpu-float16", "lowering": "aot_eager"}
    if attached:
        options["scaler"] = given
    got, said = run(loop, given, lambda body: torch.compile(body, backend="fxamp", options=options))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    torch.testing.assert_close(said, told, rtol=0, atol=0, equal_nan=True)
    assert given.skipped_steps == 1 and told[1][-1] == 2.0**7


def test_everything_that_a_scaler_tells_may_be_asked_for_in_a_compiled_function() -> None:
    given, net = scaler(), Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)

    def body(x: Tensor) -> list[Any]:
        given.scale(net(x).sum()).backward()
        norm = given.clip_grad_norm_(optimizer, 1.0)
        skipped = given.step(optimizer, return_skipped=True).skipped
        given.update()
        given.name_parameters(net)
        told = [given.get_scale(), given.loss_scale, given.skipped_steps, given.overflowed(), given.poll_steps()]
        return [norm.isfinite().item(), skipped, *told]

    step = compile_scaled(body, given, "aot_eager")
    assert step(torch.ones(2, 4)) == [True, False, 1.0, 2.0**8, 0, {}, [True]]
    bad = step(torch.full((2, 4), INF))
    assert bad[:5] == [False, True, 1.0, 2.0**7, 1]
    # The last bias's gradient is the sum of tangents, whatever the input.
    assert set(bad[5]) == {"first.weight", "first.bias", "last.weight"}


def test_another_compilers_function_breaks_at_the_scaler_too() -> None:
    wanted, told = run(plain, torch.amp.GradScaler("cpu", init_scale=2.0**8))
    given = fxamp.GradScaler("cpu", init_scale=2.0**8)
    net_loop = torch.compile(plain, backend="eager")
    got, said = run(net_loop, given)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    torch.testing.assert_close(said, told, rtol=0, atol=0, equal_nan=True)
