"""Policies with products in fp8, end to end: torchao's numbers, and every place where graphs are rewritten."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torchao_beside import RECIPES, autocast, converted
from transformers.pytorch_utils import Conv1D

from fxamp.policy import Category, Policy, Rule

PRODUCTS = ("linear", "addmm.default", "mm.default", "matmul")


def policy(recipe: str = "tensorwise", *others: Rule, base: str = "cpu-bfloat16", **more: Any) -> Policy:
    """cpu-bfloat16 with all products in fp8."""
    exact = Policy.load(base)
    rules = (*exact.rules, Rule("fp8", Category.FP8, PRODUCTS, recipe=recipe, **more), *others)
    return Policy("fp8", "cpu", exact.lower_precision_fp, rules=rules)


def gradients(call: Callable[..., Any], model: nn.Module, *inputs: Any, **named: Any) -> dict[str, Tensor]:
    model.zero_grad()
    result = call(*inputs, **named)
    loss = getattr(result, "loss", result)
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | found


def compiled(model: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    twin = copy.deepcopy(model)
    twin.compile(backend="fxamp", options=options)
    return twin


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """The names of what differs."""
    assert ours.keys() == theirs.keys()
    return [name for name, value in theirs.items() if not torch.equal(ours[name], value)]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.norm(self.up(x)))).float().square().mean()


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_linear_layers_are_torchaos(recipe: str, lowering: str) -> None:
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(2, 16, 32)
    whole = recipe != "rowwise_with_gw_hp"  # torchao refuses float32 weights with that one
    if not whole:
        model, x = model.bfloat16(), x.bfloat16()
    theirs = converted(model, recipe)

    def beside(value: Tensor) -> Tensor:
        with autocast(torch.bfloat16):
            return theirs(value)

    ours = compiled(model, policy=policy(recipe), lowering=lowering)
    assert same(gradients(ours, ours, x), gradients(beside if whole else theirs, theirs, x)) == []


def small_gpt2() -> nn.Module:
    size = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64, "n_positions": 16}
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        **size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager"
    )
    return transformers.GPT2LMHeadModel(config)


def small_llama() -> nn.Module:
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**size, num_key_value_heads=2, vocab_size=64, attn_implementation="eager")
    return transformers.LlamaForCausalLM(config)


class Transposed(nn.Linear):
    """A Conv1D of transformers as the linear layer that torchao can swap."""

    @staticmethod
    def of(layer: Conv1D) -> "Transposed":
        made = Transposed(*layer.weight.shape)
        made.weight = nn.Parameter(layer.weight.detach().t())
        made.bias = layer.bias
        return made


def with_linear_layers(model: nn.Module) -> nn.Module:
    """A copy of ``model`` in which every Conv1D is a linear layer."""
    twin = copy.deepcopy(model)
    for module in list(twin.modules()):
        for name, child in module.named_children():
            if isinstance(child, Conv1D):
                setattr(module, name, Transposed.of(child))
    return twin


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("make", [small_gpt2, small_llama])
def test_language_models_are_torchaos(make: Callable[[], nn.Module], recipe: str, lowering: str) -> None:
    model = make()
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    theirs = converted(with_linear_layers(model), recipe)

    def beside(**inputs: Tensor) -> Any:
        with autocast(torch.bfloat16):
            return theirs(**inputs)

    wanted = gradients(beside, theirs, input_ids=tokens, labels=tokens)
    swapped = {name for name, module in model.named_modules() if isinstance(module, Conv1D)}
    wanted = {n: g.t() if n.endswith("weight") and n[:-7] in swapped else g for n, g in wanted.items()}
    ours = compiled(model, policy=policy(recipe), lowering=lowering)
    assert same(gradients(ours, ours, input_ids=tokens, labels=tokens), wanted) == []
