"""The models: a table of architectures with random weights; nothing is downloaded.

Dropout is off, so the same seed gives every contender the same loss.
"""

import importlib.util
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxamp.errors import OptionError, nearest

#: A batch: the model's keyword arguments, on the CPU.
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Model:
    """How to build a model and one batch for it, from the same dimensions.

    ``build(**dimensions)`` gives a module that returns its loss, or a transformers output with ``.loss``.
    ``batch(**dimensions)`` draws one batch from torch's global generator. ``sizes`` holds the dimensions by ``--size``.
    """

    build: Callable[..., nn.Module]
    batch: Callable[..., Batch]
    sizes: Mapping[str, Mapping[str, int]]
    needs: str = ""


def require(name: str) -> None:
    """Raise OptionError if the model ``name`` needs a package that is not installed."""
    needs = MODELS[name].needs
    if needs and importlib.util.find_spec(needs) is None:
        raise OptionError(f"--model {name} needs {needs}, which is not installed: pip install {needs}")


def sizes(name: str, size: str, changed: Mapping[str, int]) -> dict[str, int]:
    """The dimensions of a model in a size, some of them changed. Raises OptionError for one that it does not have."""
    usual = MODELS[name].sizes[size]
    for dimension in changed:
        if dimension not in usual:
            hint = nearest(dimension, usual)
            raise OptionError(f"--set {dimension}: no size of {name}{hint}; accepted: {', '.join(usual)}")
    return {**usual, **changed}


def depth_name(dimensions: Collection[str]) -> str:
    """The name of the dimension that counts a model's layers or stages; "" without one."""
    return next((name for name in ("layers", "depth") if name in dimensions), "")


def build(
    name: str, size: str, seed: int, batches: int, changed: Mapping[str, int] | None = None
) -> tuple[nn.Module, list[Batch]]:
    """The model in training mode and ``batches`` batches, on the CPU; the same for the same seed.

    ``changed``: dimensions that differ from those of ``size``.
    """
    model, dimensions = MODELS[name], sizes(name, size, changed or {})
    torch.manual_seed(seed)
    return model.build(**dimensions).train(), [model.batch(**dimensions) for _ in range(batches)]


class LossAlone(nn.Module):
    """A model that returns nothing but its loss: a training step reads nothing else."""

    def __init__(self, model: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = self.model(*args, **kwargs)
        return getattr(result, "loss", result)


def _gpt2(layers: int, width: int, heads: int, vocabulary: int, length: int, **_: int) -> nn.Module:
    model: Any = _from_config(
        "GPT2",
        "LMHeadModel",
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        vocab_size=vocabulary,
        n_positions=length,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    model.loss_type = "ForCausalLM"  # as it is; else transformers logs so, which breaks the graph before the loss
    gpt2: nn.Module = model
    return gpt2


def _bert(layers: int, width: int, heads: int, vocabulary: int, length: int, **_: int) -> nn.Module:
    return _from_config(
        "Bert",
        "ForMaskedLM",
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def _llama(layers: int, width: int, heads: int, vocabulary: int, length: int, hidden: int = 0, **_: int) -> nn.Module:
    return _from_config(
        "Llama",
        "ForCausalLM",
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        intermediate_size=hidden or 4 * width,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        use_cache=False,
    )


def _vit(layers: int, width: int, heads: int, image: int, patch: int, classes: int, **_: int) -> nn.Module:
    return _from_config(
        "ViT",
        "ForImageClassification",
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        image_size=image,
        patch_size=patch,
        num_labels=classes,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def _resnet(width: int, depth: int, classes: int, **_: int) -> nn.Module:
    """ResNet-50 (He et al. 2015) with ``depth`` of its four stages, of 3, 4, 6 and 3 bottleneck blocks."""
    return _from_config(
        "ResNet",
        "ForImageClassification",
        embedding_size=width,
        hidden_sizes=[4 * width * 2**stage for stage in range(depth)],
        depths=[3, 4, 6, 3][:depth],
        num_labels=classes,
    )


class MLP(nn.Module):
    """``layers`` linear layers of ``width`` with GELU between them and residuals around them, then a classifier."""

    def __init__(self, layers: int, width: int, classes: int, **_: int) -> None:
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

    def __init__(self, width: int, hidden: int, experts: int, classes: int, **_: int) -> None:
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
        by_experts = torch.bmm(F.gelu(torch.bmm(x[chosen], self.rise)), self.fall) * scores.unsqueeze(-1)
        mixed = torch.zeros_like(inputs).index_add(0, chosen.flatten(), by_experts.flatten(0, 1).to(inputs.dtype))
        return F.cross_entropy(self.head(inputs + mixed), targets)


def _from_config(family: str, head: str, **settings: Any) -> nn.Module:
    """A model of transformers with random weights. It is untyped, as its own types do not fit its arguments."""
    hf: Any = import_module("transformers")
    model: nn.Module = getattr(hf, family + head)(getattr(hf, f"{family}Config")(**settings))
    return model


def _text(batch: int, length: int, vocabulary: int, **_: int) -> Batch:
    tokens = torch.randint(vocabulary, (batch, length))
    return {"input_ids": tokens, "labels": tokens}


def _images(batch: int, image: int, classes: int, **_: int) -> Batch:
    return {"pixel_values": torch.randn(batch, 3, image, image), "labels": torch.randint(classes, (batch,))}


def _points(batch: int, width: int, classes: int, **_: int) -> Batch:
    return {"inputs": torch.randn(batch, width), "targets": torch.randint(classes, (batch,))}


_TINY_TEXT = {"layers": 2, "width": 64, "heads": 4, "vocabulary": 512, "length": 32, "batch": 2}
_SMALL_TEXT = {"layers": 2, "width": 512, "heads": 8, "vocabulary": 8192, "length": 256, "batch": 8}


def _language(make: Callable[..., nn.Module], **full: int) -> Model:
    return Model(make, _text, {"tiny": _TINY_TEXT, "small": _SMALL_TEXT, "full": full}, needs="transformers")


MODELS: dict[str, Model] = {
    "gpt2-124m": _language(_gpt2, layers=12, width=768, heads=12, vocabulary=50257, length=1024, batch=8),
    "bert-base": _language(_bert, layers=12, width=768, heads=12, vocabulary=30522, length=512, batch=16),
    "llama-1b": _language(_llama, layers=16, width=2048, heads=32, vocabulary=32000, length=2048, batch=2),
    "llama-8b-2-layers": _language(
        _llama, layers=2, width=4096, heads=32, hidden=14336, vocabulary=128256, length=4096, batch=2
    ),
    "resnet50": Model(
        _resnet,
        _images,
        {
            "tiny": {"width": 8, "depth": 1, "classes": 10, "image": 32, "batch": 2},
            "small": {"width": 64, "depth": 2, "classes": 1000, "image": 128, "batch": 16},
            "full": {"width": 64, "depth": 4, "classes": 1000, "image": 224, "batch": 64},
        },
        needs="transformers",
    ),
    "vit-b": Model(
        _vit,
        _images,
        {
            "tiny": {"layers": 2, "width": 64, "heads": 4, "image": 32, "patch": 8, "classes": 10, "batch": 2},
            "small": {"layers": 2, "width": 512, "heads": 8, "image": 224, "patch": 16, "classes": 1000, "batch": 8},
            "full": {"layers": 12, "width": 768, "heads": 12, "image": 224, "patch": 16, "classes": 1000, "batch": 64},
        },
        needs="transformers",
    ),
    "mlp": Model(
        MLP,
        _points,
        {
            "tiny": {"layers": 3, "width": 64, "classes": 10, "batch": 32},
            "small": {"layers": 4, "width": 1024, "classes": 1000, "batch": 1024},
            "full": {"layers": 8, "width": 4096, "classes": 1000, "batch": 4096},
        },
    ),
    "moe-tiny": Model(
        Experts,
        _points,
        {
            "tiny": {"width": 64, "hidden": 128, "experts": 4, "classes": 10, "batch": 64},
            "small": {"width": 512, "hidden": 2048, "experts": 4, "classes": 10, "batch": 2048},
            "full": {"width": 1024, "hidden": 4096, "experts": 8, "classes": 1000, "batch": 16384},
        },
    ),
}

#: "tiny" trains anywhere in milliseconds; in "small" the products are large enough that a CPU with units for bfloat16
#: gains by it; "full" is for GPUs.
SIZES = ("tiny", "small", "full")

#: The models of the tables that show many.
EVERY = ("gpt2-124m", "bert-base", "llama-1b", "vit-b", "resnet50")
