"""Values from which a backward recomputes ops that jump, such as floor, stay as the forward made them."""

from collections.abc import Callable

import pytest
import torch
from support.checks.exhaustive import each_once, exhaustive
from support.machines.lacks import needs_compiler
from test_kept_rules import BASE, all_in, compiled_gradients
from torch import Tensor, nn
from torch.nn import functional as F

from fxamp import Policy

X = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
INDUCTOR = pytest.param("inductor", marks=[needs_compiler, pytest.mark.exhaustive])

#: Functions of values from 0 to 511.
JUMPS: dict[str, Callable[[Tensor], Tensor]] = {
    "floor": lambda p: p - p.floor(),
    "ceil": lambda p: p.ceil() - p,
    "round": lambda p: p - p.round(),
    "round-decimals": lambda p: 10 * (p - p.round(decimals=1)),
    "trunc": lambda p: p - p.trunc(),
    "frac": lambda p: p.frac(),
    "fmod": lambda p: p.fmod(1.0),
    "remainder": lambda p: p % 3.0,
    "rounding-mode": lambda p: p - torch.div(p, 2.0, rounding_mode="trunc") * 2.0,
    "integers": lambda p: p - p.to(torch.int32),
    "comparison": lambda p: 2.0 * (p > 200.0),
    "sign": lambda p: (p - 250.0).sign(),
    "index": lambda p: torch.arange(512.0).sin()[p.round().long()],
    "bits": lambda p: p - (p.view(torch.int32) & -(2**14)).view(torch.float32),
}

#: Ordinary functions that have kinks, and masks; the shipped policies pack what they read.
SMOOTH: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda y: y.clamp(-0.5, 0.5),
    "relu": torch.relu,
    "leaky-relu": lambda y: F.leaky_relu(y, 0.1),
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "elu": F.elu,
    "softplus": F.softplus,
    "maximum": lambda y: torch.maximum(y, 0.1 * y + 0.3),
    "pool": lambda y: F.max_pool1d(y, 2).repeat(1, 2),
    "dropout": lambda y: F.dropout(y.tanh(), 0.3),
    "infinities": lambda y: y.masked_fill(torch.isinf(y), 0.0),
    "shape": lambda y: y * torch.ones_like(y, dtype=torch.int32),
}


#: Functions of values above 0 whose gradients grow without bound as the values, or what is computed from them, shrink.
STEEP: dict[str, Callable[[Tensor], Tensor]] = {
    "quotient": lambda p: p.flip(0) / p,
    "inverse": lambda p: 1.0 / p,
    "root": torch.sqrt,
    "inverse-root": torch.rsqrt,
    "logarithm": torch.log,
    "negative-power": lambda p: p**-0.5,
    "hypotenuse": lambda p: torch.hypot(p, p.flip(0)),
    "norm": lambda p: p.unflatten(1, (-1, 1)).norm(dim=2),
    "quotient-with-epsilon": lambda p: p.flip(0) / (p * p + 1e-9),
    "arc-cosine": lambda p: torch.acos(1 - p),
    "arc-tangent": lambda p: torch.atanh(1 - p),
    "gamma": torch.lgamma,
    "inverse-error": lambda p: torch.erfinv(1 - p),
    "angle": lambda p: torch.atan2(p, p.roll(1, 0)),
    "cross-entropy": lambda p: F.binary_cross_entropy(p / 2, torch.full_like(p, 0.5), reduction="none"),
    "divergence": lambda p: F.kl_div(p.log(), p.flip(0), reduction="none"),
    "determinant": lambda p: torch.linalg.det(p.unflatten(1, (8, 8))),
}


#: Functions whose backwards look for the elements that equal the result.
EXTREMES: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda y: y * y.amax(-1, keepdim=True),
    "max": lambda y: y * y.max(),
    "norm": lambda y: y * torch.linalg.vector_norm(y, torch.inf, -1, keepdim=True),
    "scatter": lambda y: y * y.scatter_reduce(1, torch.zeros_like(y, dtype=torch.int64), y, "amin", include_self=False),
    "index": lambda y: y * y.index_reduce(0, torch.zeros(64, dtype=torch.int64), y, "amax", include_self=False),
    "distance": lambda y: y * torch.cdist(y, y.flip(0) + 1.0, p=torch.inf)[:, :1],
}


class Wide(nn.Module):
    """A function of values between 1e-6 and 1, of which 8-bit integers round most to zero."""

    def __init__(self, steep: Callable[[Tensor], Tensor], times: int = 1) -> None:
        super().__init__()
        self.linear, self.steep, self.times = nn.Linear(32, 64), steep, times

    def forward(self, x: Tensor) -> Tensor:
        p = 10.0 ** (-6.0 * torch.sigmoid(4.0 * self.linear(x).float()))
        return self.steep(p.repeat(self.times, 1) * 1.5).sum()


class Positions(nn.Module):
    """A wide result from a function of positions that the model computes: recomputed, they take less memory."""

    def __init__(self, jump: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.jump = nn.Linear(32, 64), jump

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).float()
        jumped = self.jump(torch.sigmoid(y) * 511.0) + y
        return (jumped.unsqueeze(-1) * torch.linspace(0.5, 1.5, 8)).sin().sum()


class Activated(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(32, 128), nn.Linear(128, 32), function

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(self.function(y.float() * 2.0)).float().square().sum()


class Together(nn.Module):
    """The sum of what ``parts`` return."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x) for part in self.parts]).sum()


def outcome(model: nn.Module, policy: Policy, lowering: str) -> tuple[float, str, str]:
    """How far the gradients are at most from those without keep rules, and the forms and reasons of all values."""
    torch.manual_seed(1)
    _, plain, _ = compiled_gradients(model, X, BASE, lowering)
    torch.manual_seed(1)
    _, kept, report = compiled_gradients(model, X, policy, lowering)
    values = report.graphs[-1].kept
    ratios = [float((kept[name] - plain[name]).norm() / plain[name].norm()) for name in plain]
    return max(ratios), str([value.form for value in values]), str([value.reason for value in values])


#: The error that packing smooth functions' values leaves, at most; a jump leaves 0.1 and more.
ROUNDING = {"int8": 0.02, "float8_e4m3fn": 0.06, "float8_e5m2": 0.1, "bfloat16": 0.01}


@each_once("keep, jump", ROUNDING, exhaustive(JUMPS, always=list(JUMPS)[::5]))
def test_what_a_jump_reads_again_is_not_rounded(keep: str, jump: str) -> None:
    error, _, _ = outcome(Positions(JUMPS[jump]), all_in(keep), "aot_eager")
    assert error <= ROUNDING[keep]


@pytest.mark.exhaustive
@needs_compiler
def test_under_inductor_what_jumps_read_is_not_rounded() -> None:
    model = Together(*(Positions(JUMPS[name]) for name in ("floor", "remainder", "comparison", "index")))
    error, _, _ = outcome(model, all_in("int8"), "inductor")
    assert error <= ROUNDING["int8"]


@pytest.mark.parametrize("lowering", ["aot_eager", INDUCTOR])
@pytest.mark.parametrize(
    "policy", exhaustive(["cpu-bfloat16-lean", "cpu-bfloat16-leanest"], always=["cpu-bfloat16-lean"])
)
def test_the_shipped_policies_interpolate_in_a_table(policy: str, lowering: str) -> None:
    error, _, reasons = outcome(Interpolation(), Policy.load(policy), lowering)
    assert error <= 0.02 and "may jump" in reasons


@each_once("keep, steep", ["int8", "float8_e4m3fn"], exhaustive(STEEP, always=list(STEEP)[::5]))
def test_what_a_backward_divides_by_is_not_rounded_to_zero(keep: str, steep: str) -> None:
    """Other factors of these gradients are rounded by up to their size, but nothing becomes infinite."""
    error, _, _ = outcome(Wide(STEEP[steep]), all_in(keep), "aot_eager")
    assert error < 1.4


@pytest.mark.parametrize("extreme", exhaustive(EXTREMES, always=list(EXTREMES)[::2]))
def test_the_shipped_policies_find_the_largest_elements_again(extreme: str) -> None:
    model = Activated(lambda y: EXTREMES[extreme](y.repeat(8, 1)))
    error, _, _ = outcome(model, Policy.load("cpu-bfloat16-lean"), "aot_eager")
    assert error <= 0.02


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize("steep", STEEP)
def test_under_inductor_what_a_backward_divides_by_is_not_rounded_to_zero(steep: str) -> None:
    error, _, _ = outcome(Wide(STEEP[steep]), all_in("int8"), "inductor")
    assert error < 1.4


@pytest.mark.parametrize("steep", exhaustive(STEEP, always=["quotient"]))
def test_the_shipped_policies_divide(steep: str) -> None:
    error, _, _ = outcome(Wide(STEEP[steep], 128), Policy.load("cpu-bfloat16-lean"), "aot_eager")
    assert error <= 0.1


class Interpolation(nn.Module):
    """Between two rows of a table at positions that the model computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(32, 512), nn.Embedding(512, 16)

    def forward(self, x: Tensor) -> Tensor:
        position = torch.sigmoid(self.linear(x).float()) * 510.0
        whole = position.floor()
        part, row = (position - whole).unsqueeze(-1), whole.long()
        return ((1 - part) * self.table(row) + part * self.table(row + 1)).sin().sum()


@each_once("keep, function", ["int8", "float8_e4m3fn"], exhaustive(SMOOTH, always=list(SMOOTH)[::3]))
def test_what_functions_without_jumps_read_is_packed(keep: str, function: str) -> None:
    _, forms, reasons = outcome(Activated(SMOOTH[function]), all_in(keep), "aot_eager")
    assert keep in forms and "may jump" not in reasons


@pytest.mark.exhaustive
@needs_compiler
def test_under_inductor_what_functions_without_jumps_read_is_packed() -> None:
    """Their decompositions compare values, in the forward too."""
    names = ("leaky-relu", "hardswish", "elu", "softplus")
    model = Together(*(Activated(SMOOTH[name]) for name in names))
    _, forms, reasons = outcome(model, all_in("int8"), "inductor")
    assert forms.count("int8") >= len(names) and "may jump" not in reasons


class Halves(nn.Module):
    """Positive and negative values take different functions, written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).float()
        halves = torch.where(y > 0, 1.0, -3.0) * y
        return (halves.unsqueeze(-1) * torch.linspace(0.5, 1.5, 8)).sin().sum()


@pytest.mark.parametrize("lowering", ["aot_eager", INDUCTOR])
@pytest.mark.parametrize(("keep", "packs"), [("int8", False), ("float8_e4m3fn", True), ("float8_e5m2", True)])
def test_a_comparison_with_zero_reads_floats_of_8_bits(keep: str, packs: bool, lowering: str) -> None:
    error, forms, _ = outcome(Halves(), all_in(keep), lowering)
    assert (keep in forms) is packs and error <= (ROUNDING[keep] if packs else 1e-3)


@pytest.mark.parametrize("keep", ["recompute", "as-is"])
def test_exact_forms_do_not_mind_jumps(keep: str) -> None:
    error, _, reasons = outcome(Positions(JUMPS["floor"]), all_in(keep), "aot_eager")
    assert error == 0 and "may jump" not in reasons
