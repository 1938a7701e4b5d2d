"""Convolution and BatchNorm on real images: scikit-learn's handwritten digits, 8 by 8 pixels."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import log

import pytest
import torch
from error_rule import excess, relative_errors, worse_parameters
from model_runs import Run, bfloat16_autocast, draws, run_of
from sklearn.datasets import load_digits
from support.checks.exhaustive import exhaustive
from torch import nn

from fxamp.reports import registry

_STEPS = 60
_BATCH = 100
Autocast = Callable[[], AbstractContextManager[object]]
Data = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def digits() -> tuple[Data, Data]:
    """1200 images to train on and 597 to test on, shuffled; pixels in [0, 1]."""
    torch.manual_seed(0)
    digits = load_digits()
    order = torch.randperm(len(digits.target))
    images = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
    labels = torch.tensor(digits.target)[order]
    return (images[:1200], labels[:1200]), (images[1200:], labels[1200:])


def test_digits_are_learned(digits: tuple[Data, Data]) -> None:
    train, test = digits
    through_fxamp = _network()
    _compile(through_fxamp, "aot_eager")
    before = registry.count()
    _train(through_fxamp, train)
    assert registry.count() > before
    with torch.no_grad():
        right = (through_fxamp.eval()(test[0]).argmax(1) == test[1]).float().mean().item()
    assert right > 0.9  # chance is 0.1


def test_running_statistics_are_eager_autocasts(digits: tuple[Data, Data]) -> None:
    through_fxamp, eager = _network(), _network()
    _compile(through_fxamp, "eager")
    _train(through_fxamp, digits[0], steps=12)
    _train(eager, digits[0], steps=12, autocast=bfloat16_autocast)
    theirs = dict(eager.named_buffers())
    assert theirs["layers.1.num_batches_tracked"].item() == 12
    for name, buffer in through_fxamp.named_buffers():
        assert torch.equal(buffer, theirs[name]), name


@pytest.mark.parametrize("lowering", exhaustive(["eager", "aot_eager"], always=["aot_eager"]))
def test_gradients_are_no_further_from_float64_than_autocast(digits: tuple[Data, Data], lowering: str) -> None:
    images, labels = digits[0][0][:_BATCH], digits[0][1][:_BATCH]
    network, through_fxamp, exact = _network(), _network(), _network().double()
    _compile(through_fxamp, lowering)
    before = registry.count()
    true, autocast, ours = [], [], []
    for weights in draws(network.state_dict()):
        true.append(_step(exact, weights, images.double(), labels))
        with bfloat16_autocast():
            loss = _loss(_loaded(network, weights), images, labels)
        autocast.append(run_of(network, loss))
        ours.append(_step(through_fxamp, weights, images, labels))
    assert registry.count() > before
    assert excess(relative_errors(ours, true), relative_errors(autocast, true)) <= 1
    assert list(worse_parameters(ours, autocast, true)) == []


@pytest.mark.exhaustive
def test_a_residual_network_learns_as_much_with_less_kept(digits: tuple[Data, Data]) -> None:
    """On noisy images, where the loss does not end at zero; as a measure, the same with hardly moved weights."""
    lean, moved = [], []
    for seed in range(4):
        usual = _last_loss(digits[0], seed, "cpu-bfloat16")
        lean.append(log(_last_loss(digits[0], seed, "cpu-bfloat16-lean") / usual))
        moved.append(log(_last_loss(digits[0], seed, "cpu-bfloat16", moved=True) / usual))
        assert usual < 1.5  # chance is 2.3
    noise = (sum(ratio**2 for ratio in moved) / len(moved)) ** 0.5 / len(moved) ** 0.5
    assert sum(lean) / len(lean) <= log(1.01) + noise


def _last_loss(data: Data, seed: int, policy: str, moved: bool = False) -> float:
    """The mean loss of the last of 120 steps; ``moved``: each weight by up to an eighth of a bfloat16 step before."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    network = _Residual()
    if moved:
        with torch.no_grad():
            for weight in network.parameters():
                weight.mul_(1 + torch.finfo(torch.bfloat16).eps / 8 * (2 * torch.rand_like(weight) - 1))
    network.compile(backend="fxamp", options={"policy": policy, "lowering": "aot_eager"})
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    torch.manual_seed(seed)
    losses = []
    for _ in range(120):
        chosen = torch.randint(len(data[0]), (32,))
        images = data[0][chosen] + 0.3 * torch.randn(32, 1, 8, 8)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(images), data[1][chosen])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-30:]) / 30


class _Residual(nn.Module):
    """A stem, a block with a shortcut, one that halves the image, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = _convolution(1, 16), _convolution(16, 16), _convolution(16, 16)
        self.third, self.shorter = _convolution(16, 32, 2), _convolution(16, 32, 2)
        self.head = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images).relu()
        x = (x + self.second(self.first(x).relu())).relu()
        x = (self.shorter(x) + self.third(x)).relu()
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits


def _convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs))


class _Network(nn.Module):
    """Not a bare nn.Sequential: Dynamo skips the frames of torch's own modules that ``Module.compile`` hands it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(256, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


def _network() -> nn.Module:
    torch.manual_seed(1)
    return _Network()


def _compile(network: nn.Module, lowering: str) -> None:
    torch._dynamo.reset()  # the networks share code: each test is to compile its own graphs
    network.compile(backend="fxamp", options={"policy": "cpu-bfloat16", "lowering": lowering})


def _loaded(network: nn.Module, weights: dict[str, torch.Tensor]) -> nn.Module:
    network.load_state_dict(weights)
    network.zero_grad(set_to_none=True)
    return network


def _loss(network: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(network(images).to(images.dtype), labels)


def _step(network: nn.Module, weights: dict[str, torch.Tensor], images: torch.Tensor, labels: torch.Tensor) -> Run:
    return run_of(network, _loss(_loaded(network, weights), images, labels))


def _train(network: nn.Module, data: Data, steps: int = _STEPS, autocast: Autocast = nullcontext) -> None:
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    for images, labels in zip(*(part.split(_BATCH) * (steps // 12) for part in data), strict=True):
        optimizer.zero_grad()
        with autocast():  # around the forward only: inside, autocast would go on with the casts of old weights
            loss = _loss(network, images, labels)
        loss.backward()
        optimizer.step()
