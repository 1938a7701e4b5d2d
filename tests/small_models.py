"""Small models of a user's own: Dynamo skips the frames of torch's modules that ``Module.compile`` hands it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Layer(nn.Module):
    """A square linear layer and an activation."""

    def __init__(self, width: int = 4, activation: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(width, width), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(x))


class Perceptron(nn.Module):
    """Two linear layers and an activation between them, with the same first weights each time."""

    def __init__(
        self, inputs: int, hidden: int, outputs: int, activation: Callable[[Tensor], Tensor] = torch.tanh
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.activation(self.first(x)))


class Wrapped(nn.Module):
    """Another module, as it is."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)
