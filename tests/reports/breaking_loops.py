"""A graph break inside of a loop, in a module and in a function: Dynamo skips the whole function."""

import torch
from torch import Tensor, nn

#: Dynamo's reason, which reports and the log repeat.
REASON = "Call to `torch._dynamo.graph_break()`: User-inserted graph break"


class Loops(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x


def loops(x: Tensor) -> Tensor:
    for _ in range(2):
        x = x @ x
        torch._dynamo.graph_break()
    return x
