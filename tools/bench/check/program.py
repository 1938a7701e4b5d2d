"""The program of the checks: attention, norms, wide layers and a loss."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, LENGTH, WIDTH, HIDDEN, CLASSES = 4, 16, 64, 2064, 32


class Net(nn.Module):
    """One block of a transformer and a head; its wide layers are large enough for rules for fp8 and saved tensors.

    ``square``: with a layer that is large in both dimensions, as rules for products with scales for each row ask for.
    """

    def __init__(self, square: bool = False) -> None:
        super().__init__()
        self.inner = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.outer = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.square = nn.Linear(HIDDEN, HIDDEN) if square else nn.Identity()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        q, k, v = (part.view(BATCH, LENGTH, 4, -1).transpose(1, 2) for part in self.qkv(self.inner(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(self.square(self.up(self.outer(x)).relu()))
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class Draw:
    """Weights and a batch, drawn from one seed on the CPU, so that they are the same on every device."""

    weights: dict[str, Tensor]
    x: Tensor
    target: Tensor

    def gradients(self, model: nn.Module, call: Any, scale: float = 1.0) -> dict[str, Tensor]:
        """Return the gradients that ``call(x, target)`` gives ``model`` for these weights, divided by ``scale``."""
        model.load_state_dict(self.weights)
        model.zero_grad(set_to_none=True)
        first = next(model.parameters())
        loss = call(self.x.to(first.device, first.dtype), self.target.to(first.device))
        (loss * scale).backward()
        return {n: p.grad.double().cpu() / scale for n, p in model.named_parameters() if p.grad is not None}

    def truth(self) -> dict[str, Tensor]:
        """Return the gradients in float64, on the CPU."""
        model = Net("square.weight" in self.weights).double()
        return self.gradients(model, model)


def draw(seed: int, square: bool = False) -> Draw:
    """Return the draw of a seed, of a model with or without the ``square`` layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Draw(
            {name: value.clone() for name, value in Net(square).state_dict().items()},
            torch.randn(BATCH, LENGTH, WIDTH),
            torch.randint(CLASSES, (BATCH, LENGTH)),
        )


DRAWS = 4
#: The loss is multiplied by it in eager float16, so that no gradient underflows.
SCALE = 2.0**10
