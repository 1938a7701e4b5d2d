"""Products in 8 or 4 bits whose operands the program writes to, as it does to VQ codebooks and EMA weights."""

from collections.abc import Callable

import pytest
import torch
from support.checks.exhaustive import each_once
from support.oracles.like_autocast import compile_with
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.policy import Category, Policy, Rule

RECIPES = {"tensorwise": Category.FP8, "rowwise_with_gw_hp": Category.FP8, "rceil": Category.MXFP8}
RECIPES |= {"pretraining": Category.NVFP4}


class Codebook(nn.Module):
    """A layer whose hidden values ``program`` multiplies by a buffer, a codebook or one matrix for each expert."""

    def __init__(self, program: Callable[["Codebook", Tensor], Tensor], *experts: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.program = nn.Linear(32, 32), program
        self.register_buffer("book", torch.randn(*experts, 32, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.program(self, self.encoder(x)).float().square().mean()


@torch.no_grad()
def double(book: Tensor) -> None:
    book.mul_(2.0)


def written_after(model: Codebook, h: Tensor) -> Tensor:
    y = F.linear(h, model.book)
    double(model.book)
    return y


def written_before(model: Codebook, h: Tensor) -> Tensor:
    double(model.book)
    return F.linear(h, model.book)


def written_between(model: Codebook, h: Tensor) -> Tensor:
    y = h @ model.book
    double(model.book)
    return y + h @ model.book


def written_in_part(model: Codebook, h: Tensor) -> Tensor:
    y = h @ model.book.t()
    double(model.book.view(-1)[:40])
    return y


def written_in_a_body(model: Codebook, h: Tensor) -> Tensor:
    def again(y: Tensor, book: Tensor) -> Tensor:
        book.detach().mul_(1.0)
        return y * 2.0

    return checkpoint(again, F.linear(h, model.book), model.book, use_reentrant=False)  # type: ignore[no-any-return]


def written_experts(model: Codebook, h: Tensor) -> Tensor:
    y = torch.bmm(h.view(4, -1, 32), model.book)
    double(model.book[1])
    return y


def written_input(model: Codebook, h: Tensor) -> Tensor:
    y = F.linear(h, model.book)
    h.mul_(3.0)
    return y + h


def written_input_of_experts(model: Codebook, h: Tensor) -> Tensor:
    h = h.view(4, -1, 32)
    y = torch.bmm(h, model.book)
    h.mul_(3.0)
    return y + h


def written_without_gradients(model: Codebook, h: Tensor) -> Tensor:
    with torch.no_grad():
        target = F.linear(h, model.book)
        model.book.mul_(2.0)
    return h - target


def trained(call: Callable[[Tensor], Tensor], model: Codebook) -> list[Tensor]:
    """The gradients, and the buffer after a step."""
    call(torch.randn(32, 32, generator=torch.Generator().manual_seed(1))).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*gradients, model.book]


def in_autocast(model: Codebook) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)  # type: ignore[no-any-return]

    return call


WRITES = (written_after, written_before, written_between, written_in_part, written_in_a_body)


@each_once("program, recipe, lowering", [*WRITES, written_experts], RECIPES, ["eager", "aot_eager"])
def test_a_product_whose_weight_is_written_to_trains_as_under_autocast(
    program: Callable[[Codebook, Tensor], Tensor], recipe: str, lowering: str
) -> None:
    """The encoder stays in 16 bits, so that the numbers are autocast's."""
    experts = program is written_experts
    if experts and recipe != "rceil":
        pytest.skip("one recipe here is for experts")
    model = Codebook(program, *[4] * experts)
    ours = compile_with(model, policy=policy(recipe, experts), lowering=lowering)
    actual = trained(ours, ours)
    expected = trained(in_autocast(model), model)
    for value, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=2e-2, atol=2e-2 * float(reference.abs().max()))
    assert "the program writes to its weight" in str(fxamp.report(ours))


@each_once(
    "program, lowering",
    [written_input, written_input_of_experts, written_without_gradients],
    ["eager", "aot_eager"],
)
def test_other_writes_leave_products_in_8_bits(program: Callable[[Codebook, Tensor], Tensor], lowering: str) -> None:
    """The input of a product with a frozen weight is not saved, and where gradients are off nothing is."""
    experts = program is written_input_of_experts
    model = Codebook(program, *[4] * experts)
    ours = compile_with(model, policy=policy("rceil", experts), lowering=lowering)
    actual = trained(ours, ours)
    expected = trained(in_autocast(model), model)
    for value, reference in zip(actual, expected, strict=True):
        assert float((value - reference).norm() / reference.norm()) < 0.1
    assert [graph.ops_by_dtype.get("mxfp8") for graph in fxamp.report(ours).graphs] == [1]


def policy(recipe: str, experts: bool = False) -> Policy:
    """cpu-bfloat16 with all products but the encoder's by ``recipe``."""
    exact = Policy.load("cpu-bfloat16")
    ops = ("bmm",) if experts else ("linear", "matmul")
    lower = Rule("encoder", Category.LOWER_PRECISION_FP, ("linear",), modules=("encoder",))
    rules = (*exact.rules, Rule("low", RECIPES[recipe], ops, recipe=recipe), lower)
    return Policy("low", "cpu", exact.lower_precision_fp, rules=rules)
