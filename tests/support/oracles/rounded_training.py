"""Models that train with rounded products: their gradients compared, and what the demo's GPT learns."""

import torch
from torch import Tensor

from fxamp.policy import Policy
from fxamp.tools.demo.model import GPT
from fxamp.tools.demo.sizes import Size
from support.oracles.like_autocast import compile_with


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """The names of what differs."""
    assert ours.keys() == theirs.keys()
    return [name for name, value in theirs.items() if not torch.equal(ours[name], value)]


def whole_error(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The error of all gradients as one vector, relative to it."""
    off = [(ours[name].double() - value).norm() for name, value in exact.items()]
    return float(torch.stack(off).norm() / torch.stack([value.norm() for value in exact.values()]).norm())


def last_loss(policy: "str | Policy", steps: int, last: int) -> float:
    """The mean of the ``last`` losses of the demo's GPT, on a text that repeats with noise."""
    torch.manual_seed(0)
    model = compile_with(GPT(Size(1, 2, 32, 16, 64)), policy=policy, lowering="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = (torch.arange(4096) * 7 % 64 + (torch.rand(4096) < 0.1)) % 64
    losses = []
    for start in torch.randint(4096 - 17, (steps, 4)):
        rows = torch.stack([text[at : at + 17] for at in start.tolist()])
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return sum(losses[-last:]) / last
