"""Small models of a user's own: Dynamo skips the frames of torch's modules that ``Module.compile`` hands it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Layer(nn.Module):
    """A linear layer, square unless ``outputs`` are given, and what becomes of its result and of more inputs."""

    def __init__(self, width: int = 4, activation: Callable[..., Any] = torch.relu, outputs: int | None = None) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(width, outputs or width), activation

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        return self.activation(self.linear(x), *more)


def unchanging(activation: Callable[..., Any]) -> Layer:
    """A layer of width 4 whose weight is the identity."""
    layer = Layer(4, activation)
    nn.init.eye_(layer.linear.weight)
    nn.init.zeros_(layer.linear.bias)
    return layer


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


class Forwarding(Wrapped):
    """Another module, whose attributes it has too, as wrappers of models do."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def mixture(width: int, layers: int) -> nn.Module:
    """transformers' Qwen3-MoE with four experts, two for each token, whose products are grouped."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        moe_intermediate_size=width,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=layers,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=width,
        max_position_embeddings=32,
        norm_topk_prob=True,
        use_cache=False,
        attn_implementation="eager",
        experts_implementation="grouped_mm",
    )
    model: nn.Module = transformers.Qwen3MoeForCausalLM(config)
    return model
