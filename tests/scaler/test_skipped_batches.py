"""A training loop catches an error and skips the batch; the steps after it are torch's."""

from collections.abc import Callable

import torch
from support.checks.exhaustive import each_once, exhaustive
from torch import Tensor, nn

import fxamp

#: Where the third batch raises: around a graph, in its backward, or between the calls of the loop.
PLACES = (
    "a module",
    "the backward of a module",
    "a hook of a parameter",
    "a hook of its sum",
    "a hook of the result",
    "after the forward",
    "after scale",
    "after backward",
    "after unscale_",
    "after step",
)
ALWAYS = ("a module", "the backward of a module", "a hook of a parameter", "after unscale_")


class _Skipped(Exception):
    """The error that the loop catches."""


class _Raising(torch.autograd.Function):
    """The identity, whose backward raises where ``net`` says so."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, net: "_Net") -> Tensor:
        ctx.net = net  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.net.raise_in("the backward of a module")  # type: ignore[attr-defined]
        return gradient, None


class _Net(nn.Module):
    """Two graphs, and code between them that torch.compile leaves alone; ``place`` is where the batch raises."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.place = nn.Linear(8, 8), nn.Linear(8, 4), ""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x).relu()))

    @torch.compiler.disable
    def between(self, x: Tensor) -> Tensor:
        self.raise_in("a module")
        return _Raising.apply(x, self)

    def raise_in(self, place: str) -> None:
        if self.place == place:
            raise _Skipped


def _armed(net: _Net, result: Tensor) -> list[torch.utils.hooks.RemovableHandle]:
    """Register the hooks that raise in this batch."""
    registers: dict[str, Callable[..., torch.utils.hooks.RemovableHandle]] = {
        "a hook of a parameter": net.second.bias.register_hook,
        "a hook of its sum": net.second.weight.register_post_accumulate_grad_hook,
        "a hook of the result": result.register_hook,
    }
    return [register(lambda _, place=place: net.raise_in(place)) for place, register in registers.items()]


def _train(net: _Net, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, place: str) -> list[Tensor]:
    """Train five batches, of which the third raises in ``place``; return the parameters after each batch."""
    torch.manual_seed(1)
    seen = []
    for batch in range(5):
        net.place = place if batch == 2 else ""
        hooks = []
        try:
            with torch.autocast("cpu", torch.float16):
                result = net(torch.randn(4, 8))
            hooks = _armed(net, result)
            net.raise_in("after the forward")
            loss = scaler.scale(result.float().square().mean())
            net.raise_in("after scale")
            loss.backward()
            net.raise_in("after backward")
            scaler.unscale_(optimizer)
            net.raise_in("after unscale_")
            scaler.step(optimizer)
            net.raise_in("after step")
        except _Skipped:
            seen.append(torch.tensor(batch))
        assert (len(seen) % 4 == 1) == (batch >= 2), f"batch {batch} was not the one that raised"
        if net.place in ("", "after unscale_", "after step"):
            scaler.update()
        optimizer.zero_grad()
        for hook in hooks:
            hook.remove()
        seen += [parameter.detach().clone() for parameter in net.parameters()]
    return seen


@each_once("place, lowering, skip", exhaustive(PLACES, ALWAYS), ["eager", "aot_eager"], ["host", "device"])
def test_the_steps_after_a_skipped_batch_are_torchs(place: str, lowering: str, skip: str) -> None:
    ours, theirs = _Net(), _Net()
    theirs.load_state_dict(ours.state_dict())
    scaler = fxamp.GradScaler("cpu", init_scale=1024.0, skip=skip)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.5)
    optimizer = fxamp.compile_optimizer(optimizer, lowering="aot_eager") if skip == "device" else optimizer
    compiled = torch.compile(ours, backend="fxamp", options={"scaler": scaler, "lowering": lowering})
    torchs = torch.amp.GradScaler("cpu", init_scale=1024.0), torch.optim.SGD(theirs.parameters(), lr=0.5)
    expected = _train(theirs, *torchs, place)
    torch.testing.assert_close(_train(compiled, scaler, optimizer, place), expected)
