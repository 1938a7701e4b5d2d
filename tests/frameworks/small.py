"""What all frameworks train here: a model with an op of every kind of cast, batches, and how runs are compared."""

import torch
from support.checks.equality import assert_equal
from torch import Tensor, nn

#: Few enough to be quick, with an overflow in the middle: float16 ends at 65504.
STEPS = 6
WIDTH = 8
LOUD = 3


class Net(nn.Module):
    """Returns the loss alone, so that nothing is left outside of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.head = nn.Linear(2 * WIDTH, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.norm(self.body(x)).relu()), target)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batches(loud: bool = False) -> list[tuple[Tensor, Tensor]]:
    """The same in every run. ``loud``: one of them holds values that float16 does not."""
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(4, WIDTH, generator=generator), torch.randint(4, (4,), generator=generator)) for _ in range(STEPS)
    ]
    if loud:
        batches[LOUD][0].mul_(1e6)
    return batches


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Bit for bit, under the same names."""
    assert list(ours) == list(theirs)
    assert_equal(ours, theirs)
