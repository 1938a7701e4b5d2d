"""Two small models in plain torch.nn; each returns its loss."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """``layers`` linear layers of ``width`` with GELU between them and residuals around them, then a classifier."""

    def __init__(self, layers: int, width: int, classes: int) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of float32[batch, width] against int64[batch]."""
        x = inputs
        for layer in self.body:
            x = x + F.gelu(layer(x))
        return F.cross_entropy(self.head(self.norm(x)), targets)


class Experts(nn.Module):
    """A mixture of experts where each expert takes its share of the tokens (expert choice, Zhou et al. 2022).

    Shapes do not depend on the data: with ``n`` tokens and ``e`` experts each takes the ``2 n / e`` tokens that its
    router scores highest, so that a token meets two experts on average.
    """

    def __init__(self, width: int, hidden: int, experts: int, classes: int) -> None:
        super().__init__()
        self.experts = experts
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts, bias=False)
        self.rise = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.fall = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of float32[tokens, width] against int64[tokens]."""
        x = self.norm(inputs)
        scores, chosen = self.router(x).softmax(-1).t().topk(2 * len(x) // self.experts)
        given = x[chosen]
        done = torch.bmm(F.gelu(torch.bmm(given, self.rise)), self.fall) * scores.unsqueeze(-1)
        mixed = torch.zeros_like(inputs).index_add(0, chosen.flatten(), done.flatten(0, 1).to(inputs.dtype))
        return F.cross_entropy(self.head(inputs + mixed), targets)
