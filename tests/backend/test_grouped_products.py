"""Products of experts: the numbers of eager autocast in bfloat16, and those of torchao in fp8 and MXFP8."""

import copy
from typing import Any

import pytest
import torch
from support.checks.exhaustive import exhaustive
from support.oracles import experts_beside
from support.oracles.like_autocast import compile_with
from support.oracles.mxfp8_beside import EmulatedLinear
from torch import Tensor, nn
from torch.nn import functional as F

import fxamp
from fxamp.errors import PolicyError
from fxamp.policy import Policy


class Experts(nn.Module):
    """Rows sorted by expert, and where the rows of each expert end."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(32, 32)
        self.up = nn.Parameter(torch.randn(4, 64, 32) / 4)
        self.down = nn.Parameter(torch.randn(4, 32, 64) / 6)

    def product(self, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(rows.bfloat16(), weight.bfloat16().transpose(1, 2), offs=ends)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        hidden = self.product(self.read(x), self.up, ends)
        return self.product(F.silu(hidden), self.down, ends).float().square().mean()


class ByTorchao(Experts):
    """The same in MXFP8 by torchao."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.read.__class__, self.recipe = EmulatedLinear, recipe
        self.read.recipe = recipe  # type: ignore[assignment]

    def product(self, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return experts_beside.product(rows.bfloat16(), weight.bfloat16().transpose(1, 2), ends, self.recipe)


def gradients(call: nn.Module, *inputs: Tensor) -> list[Tensor]:
    loss = call(*inputs)
    wanted = [*call.parameters(), *(value for value in inputs if value.requires_grad)]
    return [loss.detach(), *torch.autograd.grad(loss, wanted)]


def compiled(model: nn.Module, policy: Any, lowering: str = "aot_eager", **options: Any) -> Any:
    return compile_with(model, lowering, policy=policy, **options)


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(value.isfinite().all() and torch.equal(value, o) for value, o in zip(ours, theirs, strict=True))


ENDS = ([3, 5, 5, 64], [0, 4, 64, 64])


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
@pytest.mark.parametrize("variant", ["", "-moe"])
def test_in_bfloat16_they_are_those_of_eager_autocast(lowering: str, variant: str) -> None:
    model, x = Experts(), torch.randn(64, 32, requires_grad=True)
    ours = compiled(model, f"cpu-bfloat16{variant}", lowering)
    for ends in ENDS:
        offsets = torch.tensor(ends, dtype=torch.int32)
        with torch.autocast("cpu", torch.bfloat16):
            expected = gradients(model, x, offsets)
        assert same(gradients(ours, x, offsets), expected)


def with_recipe(recipe: str) -> Policy:
    """cpu-bfloat16-mxfp8-moe with another recipe."""
    return Policy.loads(Policy.load("cpu-bfloat16-mxfp8-moe").dumps().replace('"rceil"', f'"{recipe}"'))


@pytest.mark.parametrize(
    "recipe", exhaustive(["floor", "rceil", "rceil_wgrad_with_hp"], always=["rceil_wgrad_with_hp"])
)
@pytest.mark.parametrize("lowering", exhaustive(["eager", "aot_eager"], always=["aot_eager"]))
def test_in_mxfp8_they_are_torchaos(recipe: str, lowering: str) -> None:
    """torchao quantizes a linear layer's weight after a cast to bfloat16: it holds values of bfloat16."""
    theirs, x = ByTorchao(recipe).bfloat16().float(), torch.randn(64, 32, requires_grad=True)
    model = Experts()
    model.load_state_dict(theirs.state_dict())
    ours = compiled(model, with_recipe(recipe), lowering)
    for ends in ENDS:
        offsets = torch.tensor(ends, dtype=torch.int32)
        with torch.autocast("cpu", torch.bfloat16):
            expected = gradients(theirs, x, offsets)
        assert same(gradients(ours, x, offsets), expected)
    assert f"Products in fp8, by recipe:\n  mxfp8 {recipe}: 3" in str(fxamp.report(ours))


def errors(ours: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [
        float((one.double() - other.double()).norm() / other.norm()) for one, other in zip(ours, exact, strict=True)
    ]


class Stacked(nn.Module):
    """As many rows for each expert, by ``baddbmm``, ``bmm``, ``einsum`` and ``@``."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(4, 32, 64), (4, 64, 32), (4, 32, 32), (4, 32, 64)]
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(size) / size[1] ** 0.5) for size in sizes)
        self.bias = nn.Parameter(torch.randn(4, 1, 64))

    def forward(self, x: Tensor) -> Tensor:
        up, down, square, last = self.weights
        hidden = torch.baddbmm(self.bias, x, up).sin()
        hidden = torch.einsum("eri,eio->ero", torch.bmm(hidden, down), square)
        return (hidden @ last).square().mean()


@pytest.mark.parametrize("kind", exhaustive(["mxfp8-moe", "fp8-rowwise-moe"], always=["fp8-rowwise-moe"]))
def test_products_of_stacked_weights(kind: str) -> None:
    """Four products in a row; each rounds two operands to 2^-4 of a value at most."""
    model, x = Stacked(), torch.randn(4, 5, 32, requires_grad=True)
    exact = gradients(copy.deepcopy(model).double(), x.detach().double().requires_grad_())
    ours = compiled(model, f"cpu-bfloat16-{kind}")
    results = gradients(ours, x)
    assert max(errors(results, exact)) < 0.15
    assert fxamp.report(ours).graphs[0].ops_by_dtype[kind.partition("-")[0]] == 4
    assert same(gradients(compiled(model, f"cpu-bfloat16-{kind}", "eager"), x), results)


@pytest.mark.exhaustive
def test_the_number_of_rows_may_change() -> None:
    model, x = Experts(), torch.randn(40, 32, requires_grad=True)
    moving, offsets = compiled(model, "cpu-bfloat16-mxfp8-moe"), torch.tensor([3, 5, 5, 40], dtype=torch.int32)
    torch._dynamo.mark_dynamic(x, 0)
    first = gradients(moving, x, offsets)
    more = torch.randn(75, 32, requires_grad=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        second = gradients(moving, more, offsets * 3 // 2)
    assert same(first, gradients(compiled(model, "cpu-bfloat16-mxfp8-moe", "eager"), x, offsets))
    anew = compiled(model, "cpu-bfloat16-mxfp8-moe", "eager")
    assert same(second, gradients(anew, more, offsets * 3 // 2))


@pytest.mark.inductor
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["mxfp8-moe", "fp8-rowwise-moe"])
def test_inductor_errs_no_more(kind: str) -> None:
    model, x = Experts(), torch.randn(40, 32, requires_grad=True)
    offsets = torch.tensor([3, 5, 5, 40], dtype=torch.int32)
    exact = gradients(copy.deepcopy(model).float(), x, offsets)
    plain, fused = (
        gradients(compiled(model, f"cpu-bfloat16-{kind}", lowering), x, offsets)
        for lowering in ("aot_eager", "inductor")
    )
    assert not fused[1 + list(dict(model.named_parameters())).index("up")][2].any()
    both = zip(errors(fused, exact), errors(plain, exact), strict=True)
    assert all(error <= 1.25 * plain_error for error, plain_error in both)


def test_under_float16_they_stay_in_bfloat16() -> None:
    model, x = Experts(), torch.randn(40, 32, requires_grad=True)
    scaler = fxamp.GradScaler("cpu", init_scale=2.0**10)
    ours = compiled(model, "cpu-float16-moe", scaler=scaler)
    scaler.scale(ours(x, torch.tensor([3, 5, 5, 40], dtype=torch.int32))).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in ours.parameters())
    assert fxamp.report(ours).graphs[0].ops_by_dtype["bf16"] >= 2


@pytest.mark.parametrize(
    ("kind", "facts", "refused"),
    [
        ("mxfp8-moe", {"capability": "10.0"}, ""),
        ("mxfp8-moe", {"capability": "12.0"}, r"products of experts in mxfp8: .* >=10\.0,<11\.0, but .* has 12\.0"),
        ("mxfp8-moe", {"capability": "9.0"}, r"compute capability >=10\.0, but this device has 9\.0"),
        ("fp8-rowwise-moe", {"capability": "9.0"}, ""),
        ("fp8-rowwise-moe", {"capability": "8.9"}, r"products of experts in fp8: .* >=9\.0,<11\.0, but .* has 8\.9"),
        ("fp8-rowwise-moe", {"arch": "gfx950"}, ""),
        ("fp8-rowwise-moe", {"arch": "gfx942"}, ""),
        ("fp8-rowwise-moe", {"arch": "gfx1200"}, "products of experts in fp8: gfx942 or gfx950, but .* AMD's gfx1200"),
        ("mxfp8", {"capability": "12.0"}, ""),
        ("fp8-rowwise", {"capability": "8.9"}, ""),
    ],
)
def test_gpus_without_grouped_products_are_refused_by_name(kind: str, facts: dict[str, str], refused: str) -> None:
    policy = Policy.load(f"cuda-bfloat16-{kind}")
    if not refused:
        assert policy.resolve("cuda", **facts).has_fp8  # type: ignore[arg-type]
        return
    with pytest.raises(PolicyError, match=refused):
        policy.resolve("cuda", **facts)  # type: ignore[arg-type]
