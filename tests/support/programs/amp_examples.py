"""Every use of mixed precision that torch's manual shows, as a program.

A program takes a :class:`Runner`, which says where the low precision comes from, and returns what it trained.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd

from fxamp.scaler import GradScaler

STEPS = 4
SCALE = 2.0**8
"""Low enough for float16 from the first step on: a skipped step is no part of the float32 run."""
MAX_NORM = 0.05
MAX_VALUE = 0.01
Forward = Callable[..., Tensor]


@dataclass(frozen=True)
class Runner:
    """Autocast, and a scaler that works alone; ``dtype`` None: no autocast.

    With a ``lowering`` models are compiled by fxamp and the scaler is given to the backend; nothing else changes.
    """

    dtype: torch.dtype | None
    scaling: bool = True
    lowering: str | None = None

    def scaler(self) -> GradScaler:
        return GradScaler("cpu", init_scale=SCALE, enabled=self.scaling)

    def prepare(self, forward: Forward, scaler: GradScaler) -> Forward:
        """Return ``forward`` as this runner calls it; what compiles does so here."""
        if self.lowering is None:
            return forward
        return torch.compile(forward, backend="fxamp", options={"scaler": scaler, "lowering": self.lowering})

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=self.dtype or torch.bfloat16, enabled=self.dtype is not None)

    def factor(self, scaler: GradScaler) -> float:
        """What gradients hold as a factor after the backward, before ``unscale_``."""
        return scaler.get_scale()


@dataclass(frozen=True)
class Trained:
    """The losses of a training, the parameters it began with and those it ended with."""

    losses: list[float]
    start: Tensor
    end: Tensor


class Net(nn.Module):
    """Two layers; ``matmul`` is how the second multiplies."""

    def __init__(self, seed: int = 0, matmul: Callable[[Tensor, Tensor], Tensor] = torch.mm) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 8)
        self.second = nn.Parameter(torch.randn(8, 2) / 4)
        self.matmul = matmul

    def forward(self, x: Tensor) -> Tensor:
        return self.matmul(torch.tanh(self.first(x)), self.second)


def batches(count: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(8, 4, generator=generator)
        yield x, torch.stack([x.sum(1), x[:, 0] - x[:, 1]], 1)


def flat(*models: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for model in models for p in model.parameters()]).clone()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


AfterBackward = Callable[[Runner, GradScaler, torch.optim.Optimizer, nn.Module], None]


def train(
    runner: Runner,
    net: nn.Module,
    after_backward: AfterBackward | None = None,
    wrap: Callable[[Any], Forward] = lambda model: model,
) -> Trained:
    """The plain loop, with room for what comes between backward and step."""
    optimizer, scaler, start, losses = sgd(net), runner.scaler(), flat(net), []
    forward = wrap(runner.prepare(net, scaler))
    for x, y in batches():
        optimizer.zero_grad()
        with runner.autocast():
            loss = F.mse_loss(forward(x).float(), y)
        scaler.scale(loss).backward()
        if after_backward is not None:
            after_backward(runner, scaler, optimizer, net)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return Trained(losses, start, flat(net))


def typical(runner: Runner) -> Trained:
    return train(runner, Net())


def clipping(clip: Callable[..., object], threshold: float, unscale: bool) -> Callable[[Runner], Trained]:
    """Return an example that clips true gradients, or, without ``unscale_``, what the backward left at its scale."""

    def after_backward(runner: Runner, scaler: GradScaler, optimizer: torch.optim.Optimizer, net: nn.Module) -> None:
        if unscale:
            scaler.unscale_(optimizer)
        before = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        clip(net.parameters(), threshold if unscale else threshold * runner.factor(scaler))
        assert any(not torch.equal(p.grad, old) for p, old in zip(net.parameters(), before, strict=True))

    return lambda runner: train(runner, Net(), after_backward)


def accumulation(runner: Runner) -> Trained:
    net, every, losses = Net(), 2, []
    optimizer, scaler, start = sgd(net), runner.scaler(), flat(net)
    forward = runner.prepare(net, scaler)
    for i, (x, y) in enumerate(batches(every * STEPS), start=1):
        with runner.autocast():
            loss = F.mse_loss(forward(x).float(), y) / every
        scaler.scale(loss).backward()
        losses.append(loss.item())
        if i % every == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return Trained(losses, start, flat(net))


def gradient_penalty(runner: Runner) -> Trained:
    net, losses = Net(), []
    optimizer, scaler, start = sgd(net), runner.scaler(), flat(net)
    forward = runner.prepare(net, scaler)
    for x, y in batches():
        optimizer.zero_grad()
        with runner.autocast():
            loss = F.mse_loss(forward(x).float(), y)
        gradients = torch.autograd.grad(scaler.scale(loss), list(net.parameters()), create_graph=True)
        inverse = 1.0 / runner.factor(scaler)
        with runner.autocast():
            squares = [(gradient * inverse).square().sum() for gradient in gradients]
            loss = loss + torch.stack(squares).sum().sqrt()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return Trained(losses, start, flat(net))


def several(runner: Runner) -> Trained:
    """Two models, two losses over both, two optimizers, one scaler; one optimizer unscaled by hand."""
    nets = [Net(0), Net(1)]
    optimizers, scaler, start, losses = [sgd(net) for net in nets], runner.scaler(), flat(*nets), []
    forwards = [runner.prepare(net, scaler) for net in nets]
    for x, y in batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        with runner.autocast():
            a, b = (forward(x).float() for forward in forwards)
            total, difference = F.mse_loss(a + b, y), F.mse_loss(a - 2 * b, y)
        scaler.scale(total).backward(retain_graph=True)
        scaler.scale(difference).backward()
        scaler.unscale_(optimizers[0])
        nn.utils.clip_grad_norm_(nets[0].parameters(), 1.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        losses += [total.item(), difference.item()]
    return Trained(losses, start, flat(*nets))


def threads(runner: Runner) -> Trained:
    """As DataParallel does: each half of a batch in a thread of its own, which autocasts because the forward does."""

    def in_threads(net: Forward) -> Forward:
        def half(x: Tensor, into: dict[int, Tensor], key: int) -> None:
            with runner.autocast():
                into[key] = net(x)
                if runner.dtype is not None:
                    assert into[key].dtype == runner.dtype

        def forward(x: Tensor) -> Tensor:
            outputs: dict[int, Tensor] = {}
            workers = [threading.Thread(target=half, args=(x[i::2], outputs, i)) for i in range(2)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            return torch.stack([outputs[0], outputs[1]], 1).flatten(0, 1)

        return forward

    return train(runner, Net(), wrap=in_threads)


def distributed(runner: Runner) -> Trained:
    return train(runner, Net(), wrap=nn.parallel.DistributedDataParallel)


class Matmul(torch.autograd.Function):
    """Several inputs, and an op that autocast lowers: runs, and runs back, in the caller's autocast state."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a.mm(b)

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return gradient.mm(b.t()), a.t().mm(gradient)


class Float32Matmul(torch.autograd.Function):
    """Needs float32, whatever the caller's autocast state."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        assert a.dtype == b.dtype == torch.float32
        ctx.save_for_backward(a, b)
        product = a.mm(b)
        assert product.dtype == torch.float32
        return product

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        left = gradient.mm(b.t())
        assert left.dtype == torch.float32
        return left, a.t().mm(gradient)


def custom_function(runner: Runner) -> Trained:
    return train(runner, Net(matmul=Matmul.apply))


def custom_function_in_float32(runner: Runner) -> Trained:
    return train(runner, Net(matmul=Float32Matmul.apply))


def imported_function(runner: Runner) -> Trained:
    """A function that cannot be altered: its caller turns autocast off around it and casts."""

    def matmul(a: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            product = a.float().mm(b.float())
        assert product.dtype == torch.float32
        return product

    return train(runner, Net(matmul=matmul))


EXAMPLES: dict[str, Callable[[Runner], Trained]] = {
    "typical": typical,
    "clip_norm": clipping(nn.utils.clip_grad_norm_, MAX_NORM, unscale=True),
    "clip_value": clipping(nn.utils.clip_grad_value_, MAX_VALUE, unscale=True),
    "clip_norm_scaled": clipping(nn.utils.clip_grad_norm_, MAX_NORM, unscale=False),
    "clip_value_scaled": clipping(nn.utils.clip_grad_value_, MAX_VALUE, unscale=False),
    "accumulation": accumulation,
    "gradient_penalty": gradient_penalty,
    "several": several,
    "threads": threads,
    "distributed": distributed,
    "custom_function": custom_function,
    "custom_function_in_float32": custom_function_in_float32,
    "imported_function": imported_function,
}
