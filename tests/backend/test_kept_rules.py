"""Rules for what is kept: the forward is untouched, and gradients are those of eager autograd with the same packing."""

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch._functorch.partitioners as partitioners
from support.checks.exhaustive import each_once, exhaustive
from support.machines.lacks import needs_compiler
from support.oracles.saved_tensors_oracle import as_autograd_keeps, in_eight_bits, packed_gradients
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

import fxamp
from fxamp import Policy, Rule

BASE = Policy.load("cpu-bfloat16")
LEAST, BLOCK = 512, 32
EIGHT = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


def policy(*rules: Rule, base: Policy = BASE) -> Policy:
    return replace(base, name="kept", rules=(*base.rules, *rules))


def all_in(keep: str) -> Policy:
    """All that is large, in blocks of 32 elements: all sizes of the programs allow for that."""
    block = BLOCK if keep in EIGHT else 0
    return policy(Rule("all", keep=keep, region="kept", elements=f">={LEAST}", block=block))  # type: ignore[arg-type]


class Perceptron(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.depth = depth
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        for _ in range(self.depth):
            x = x + self.down(F.gelu(self.up(self.norm(x))))
        return x.float().pow(2).mean()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(4, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(4, 16, 32)
        return self.out(x).float().pow(2).mean()


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return torch.sigmoid(self.second(F.max_pool2d(x, 2))).float().sum()


class Masked(nn.Module):
    """A mask of -inf is added and kept; a row of it is padded altogether but for one place."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.value = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.arange(16) > torch.arange(16)[:, None]
        scores = self.score(x) @ x.transpose(1, 2) + torch.zeros(16, 16).masked_fill(hidden, -torch.inf)
        weights = torch.logsumexp(scores, -1, keepdim=True)
        return (torch.exp(scores - weights) @ self.value(x)).float().pow(2).mean()


X, IMAGES = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(0)), torch.randn(2, 3, 12, 12)
PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "perceptron": (Perceptron, X),
    "attention": (Attention, X),
    "images": (Images, IMAGES),
    "masked": (Masked, X),
}


@pytest.fixture
def keeps_what_eager_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioners, "min_cut_rematerialization_partition", as_autograd_keeps)


def compiled_gradients(
    model: nn.Module, x: Tensor, policy: Policy, lowering: str = "aot_eager", **options: Any
) -> tuple[Tensor, dict[str, Tensor], Any]:
    torch._dynamo.reset()
    model.zero_grad()
    compiled = torch.compile(model, backend="fxamp", options={"policy": policy, "lowering": lowering, **options})
    loss = compiled(x)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients, fxamp.report(compiled)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.usefixtures("keeps_what_eager_keeps")
@each_once("keep, program", EIGHT, exhaustive(PROGRAMS, always=list(PROGRAMS)[::2]))
def test_gradients_are_those_of_eager_autograd_with_the_same_packing(program: str, keep: str) -> None:
    make, x = PROGRAMS[program]
    model = make().train()
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    loss, expected = packed_gradients(model, [x], lambda flat: squeezed(flat, keep), LEAST)
    model.load_state_dict(buffers, strict=False)
    loss_again, gradients, report = compiled_gradients(model, x, all_in(keep))
    packed = [value for value in report.graphs[-1].kept if value.form.startswith(keep)]
    assert len(packed) >= 3 and all(gradient.isfinite().all() for gradient in expected.values())
    assert torch.equal(loss, loss_again)
    assert same(expected, gradients)
    model.load_state_dict(buffers, strict=False)
    _, plain, _ = compiled_gradients(model, x, BASE)
    assert not same(plain, gradients), "packing in 8 bits leaves traces"


def squeezed(flat: Tensor, keep: str) -> Tensor:
    return in_eight_bits(flat, EIGHT[keep], BLOCK)


@pytest.mark.usefixtures("keeps_what_eager_keeps")
def test_wide_values_are_kept_in_sixteen_bits() -> None:
    model = Perceptron()
    loss, expected = packed_gradients(model, [X], lambda flat: flat.bfloat16().to(flat.dtype), LEAST)
    loss_again, gradients, report = compiled_gradients(model, X, all_in("bfloat16"))
    by_dtype = {value.dtype: value for value in report.graphs[-1].kept if value.rule is not None}
    assert by_dtype["f32"].form == "bfloat16" and by_dtype["f32"].after == 2 * X.numel()
    assert by_dtype["bf16"].form == "bf16" and "16 bits already" in by_dtype["bf16"].reason
    assert torch.equal(loss, loss_again) and same(expected, gradients)


@dataclass(frozen=True)
class Held:
    """One step of a compiled model. ``bytes``: what autograd holds of it beyond what is there anyway."""

    bytes: int
    loss: Tensor
    gradients: dict[str, Tensor]
    report: Any


def held(model: nn.Module, x: Tensor, policy: Policy, lowering: str) -> Held:
    """Run one step of the compiled model and look at what autograd holds in its middle."""
    torch._dynamo.reset()
    model.zero_grad()
    compiled = torch.compile(model, backend="fxamp", options={"policy": policy, "lowering": lowering})
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        loss = compiled(x)
    there = {value.untyped_storage().data_ptr() for value in (x, loss, *model.parameters(), *model.buffers())}
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in saved}
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    nbytes = sum(size for at, size in storages.items() if at not in there)
    return Held(nbytes, loss.detach(), gradients, fxamp.report(compiled))


# Not images: batch norm's fake kernel names other dtypes.
@pytest.mark.parametrize("program", exhaustive(sorted(PROGRAMS.keys() - {"images"}), always=["attention"]))
def test_autograd_holds_the_bytes_that_are_reported(program: str) -> None:
    make, x = PROGRAMS[program]
    model = make()
    before, after = (held(model, x, rules, "aot_eager") for rules in (BASE, all_in("int8")))
    values = after.report.graphs[-1].kept
    assert before.bytes == sum(value.before for value in values)
    assert after.bytes == sum(value.after for value in values) < 0.75 * before.bytes


@pytest.mark.exhaustive
@needs_compiler
def test_under_inductor_the_forward_is_the_same_and_less_is_held() -> None:
    model = Perceptron(depth=1)
    before, after = (held(model, X, rules, "inductor") for rules in (BASE, all_in("int8")))
    assert after.bytes == sum(value.after for value in after.report.graphs[-1].kept) < 0.65 * before.bytes
    torch.testing.assert_close(after.loss, before.loss, rtol=1e-6, atol=0)  # Inductor adds up in another order
    assert not same(before.gradients, after.gradients), "another policy is another graph, whatever caches know"
    for name, gradient in before.gradients.items():
        assert (after.gradients[name] - gradient).norm() <= 0.03 * gradient.norm(), name


class Decaying(nn.Module):
    """Its product reads a buffer that the forward doubles afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(1, 8))
        self.scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = (x * (self.scale @ torch.eye(8))).sum()
        self.scale.mul_(2.0)
        return y


def test_what_reads_a_buffer_that_the_forward_writes_is_not_recomputed() -> None:
    gradients = []
    for rules in ((), (Rule("again", keep="recompute", region="kept", ops=("mm",)),)):
        torch.manual_seed(0)
        model, x = Decaying(), torch.ones(4, 8, requires_grad=True)
        model.compile(backend="fxamp", options={"policy": policy(*rules), "lowering": "aot_eager"})
        model(x).backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


NORMS = [nn.BatchNorm1d(64), nn.LayerNorm(64), nn.GroupNorm(4, 64), nn.RMSNorm(64)]


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 64), norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).relu().square().sum()


@pytest.mark.parametrize("norm", exhaustive(NORMS, always=NORMS[:2]), ids=str)
def test_the_statistics_of_a_norm_are_not_packed(norm: nn.Module) -> None:
    """Kernels of a CPU compute them in the weight's dtype, and fake tensors say the input's."""
    model = Normed(copy.deepcopy(norm))
    rule = Rule("all", keep="int8", region="kept", elements=">=1")
    model.compile(backend="fxamp", options={"policy": policy(rule), "lowering": "aot_eager"})
    model(torch.randn(40, 8)).backward()
    assert len(fxamp.report(model).graphs) == 1


def test_an_overflow_stays_visible_to_a_scaler() -> None:
    """What overflows is kept as infinite, the gradients are not finite, and the scaler skips the step."""
    rule = Rule("all", keep="int8", region="kept", elements=f">={LEAST}")  # type: ignore[arg-type]
    low = policy(rule, base=Policy.load("cpu-float16"))
    model, scaler = Perceptron(), fxamp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = {"policy": low, "lowering": "aot_eager", "scaler": scaler}
    compiled = torch.compile(model, backend="fxamp", options=options)
    for factor, scale in ((1.0, 2.0**10), (1e6, 2.0**9)):
        with torch.no_grad():
            model.up.weight.mul_(factor)
        before = model.down.weight.clone()
        optimizer.zero_grad()
        scaler.scale(compiled(X)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.loss_scale == scale
        assert torch.equal(model.down.weight, before) is (factor > 1.0)


def test_eager_is_refused_by_name() -> None:
    with pytest.raises(BackendCompilerFailed, match=r"rules for what is kept .*'all'.*lowering = 'eager'.*'aot_eager'"):
        compiled_gradients(Perceptron(), X, all_in("int8"), "eager")


def test_another_partitioner_is_refused_by_name() -> None:
    inductor = {"custom_partitioner_fn": None}
    with pytest.raises(BackendCompilerFailed, match="'inductor' sets custom_partitioner_fn"):
        compiled_gradients(Perceptron(), X, all_in("int8"), "inductor", inductor=inductor)


def test_a_rule_that_matches_nothing_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    odd = Rule("odd", keep="int8", region="kept", ops=("convolution",))  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        compiled_gradients(Perceptron(), X, policy(odd))
    assert "rule 'odd'" in caplog.text


class ManyChannels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.Conv2d(64, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.norm(self.first(x)))).flatten(1).float().square().mean()


@pytest.mark.exhaustive
@needs_compiler
def test_under_inductor_blocks_along_channels_come_back() -> None:
    """Inductor's unpacked images have different strides than aot_eager's, and the same values."""
    model, x = ManyChannels(), torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    rules = policy(Rule("all", keep="int8", region="kept", elements=f">={LEAST}"))  # type: ignore[arg-type]
    loss, expected, _ = compiled_gradients(model, x, rules)
    loss_again, actual, report = compiled_gradients(model, x, rules, "inductor")
    assert [value.form for value in report.graphs[-1].kept].count("int8/64") >= 2
    torch.testing.assert_close(loss, loss_again, rtol=1e-6, atol=0)
    exact = copy.deepcopy(model).double()
    exact(x.double()).backward()
    for name, parameter in exact.named_parameters():
        if name != "first.bias":  # the norm cancels it: its gradient is all noise
            assert parameter.grad is not None
            errors = [(gradients[name] - parameter.grad).norm() for gradients in (actual, expected)]
            assert errors[0] <= 1.25 * errors[1], name
