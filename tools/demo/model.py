"""A small GPT in plain torch.nn, without any code for mixed precision."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxamp.tools.demo.sizes import Size


class Attention(nn.Module):
    """Causal self-attention: every token attends to itself and to those before it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.read = nn.Linear(size.width, 3 * size.width)
        self.write = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.read(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        written: Tensor = self.write(mixed.transpose(1, 2).reshape(batch, length, width))
        return written


class Block(nn.Module):
    """Attention, then an MLP for each token, both with residual connections."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attend = nn.Sequential(nn.LayerNorm(size.width), Attention(size))
        self.think = nn.Sequential(
            nn.LayerNorm(size.width),
            nn.Linear(size.width, 4 * size.width),
            nn.GELU(),
            nn.Linear(4 * size.width, size.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        thought: Tensor = self.think(x)
        return x + thought


class GPT(nn.Module):
    """Predicts the next token at every position of a text."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.length, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.apply(_initialise)

    def forward(self, text: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross-entropy of ``target`` given ``text``, in nats per token; both int64[batch, length]."""
        places = torch.arange(text.shape[1], device=text.device)
        x = self.blocks(self.tokens(text) + self.places(places))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _initialise(module: nn.Module) -> None:
    """Initialize normally, with GPT-2's standard deviation of 0.02, wider for embeddings; biases are zero."""
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.1)
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
