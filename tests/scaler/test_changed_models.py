"""A model that changes between two steps trains as it does with torch: no graph, cast or check of before is used."""

import copy
import io
from collections.abc import Callable

import torch
from support.checks.exhaustive import each_once, exhaustive
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import fxamp


class _Net(nn.Module):
    """Its layers may change. It is a class of its own: before torch 2.14 nn.Sequential's ``compile`` does nothing."""

    def __init__(self) -> None:
        super().__init__()
        head = nn.Dropout(0.0), nn.Linear(8, 4)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), *head)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


def _frozen(net: _Net) -> None:
    net.layers[0].requires_grad_(False)


def _partly_frozen(net: _Net) -> None:
    net.layers[5].weight.requires_grad_(False)


def _loaded(net: _Net) -> None:
    net.load_state_dict({name: value * 0.5 for name, value in net.state_dict().items()})


def _assigned(net: _Net) -> None:
    net.load_state_dict({name: value * 0.5 for name, value in net.state_dict().items()}, assign=True)


def _new_data(net: _Net) -> None:
    net.layers[3].weight.data = net.layers[3].weight.data.t().contiguous()


def _new_layer(net: _Net) -> None:
    net.layers[3] = nn.Linear(8, 8)


def _more_layers(net: _Net) -> None:
    net.layers.append(nn.Linear(4, 4))


def _normed(net: _Net) -> None:
    parametrizations.weight_norm(net.layers[3])


def _normed_and_not(net: _Net) -> None:
    parametrizations.spectral_norm(net.layers[3])
    net(torch.randn(4, 8)).sum().backward()
    parametrize.remove_parametrizations(net.layers[3], "weight")


def _pruned(net: _Net) -> None:
    prune.l1_unstructured(net.layers[3], "weight", 0.5)


def _evaluated(net: _Net) -> None:
    with torch.inference_mode(), torch.autocast("cpu", torch.float16):
        net.eval()(torch.randn(4, 8))
    net.train()


def _dropping(net: _Net) -> None:
    net.layers[4].p = 0.5


def _copied(net: _Net) -> _Net:
    return copy.deepcopy(net)


def _saved(net: _Net) -> _Net:
    stored = io.BytesIO()
    torch.save(net, stored)
    stored.seek(0)
    loaded: _Net = torch.load(stored, weights_only=False)
    return loaded


Change = Callable[[_Net], _Net | None]

CHANGES: tuple[Change, ...] = (
    _frozen,
    _partly_frozen,
    _loaded,
    _assigned,
    _new_data,
    _new_layer,
    _more_layers,
    _normed,
    _normed_and_not,
    _pruned,
    _evaluated,
    _dropping,
    _copied,
    _saved,
)


def _trained(change: Change, scaler: torch.amp.GradScaler, trainer: "_Trainer") -> list[Tensor]:
    """Train two batches before the change and two after it; return losses, parameters and buffers after each."""
    torch.manual_seed(0)
    net, seen = trainer.compiled(_Net()), []
    for batch in range(4):
        if batch == 2 and (other := change(net)) is not None:
            net = trainer.compiled(other)
        net.zero_grad()
        optimizer = trainer.stepping(torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.5))
        with torch.autocast("cpu", torch.float16):
            loss = net(torch.randn(4, 8)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        seen += [loss.detach(), *(tensor.detach().clone() for tensor in (*net.parameters(), *net.buffers()))]
    trainer.require_graphs(net)
    return seen


class _Trainer:
    """Trains as it is written."""

    def compiled(self, net: _Net) -> _Net:
        return net

    def stepping(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer

    def require_graphs(self, net: _Net) -> None:
        pass


class _Compiled(_Trainer):
    def __init__(self, lowering: str, skip: str) -> None:
        self.scaler = fxamp.GradScaler("cpu", init_scale=1024.0, skip=skip)
        self.options, self.steps = {"scaler": self.scaler, "lowering": lowering}, skip == "device"

    def compiled(self, net: _Net) -> _Net:
        net.compile(backend="fxamp", options=self.options)
        return net

    def stepping(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return fxamp.compile_optimizer(optimizer, lowering="aot_eager") if self.steps else optimizer

    def require_graphs(self, net: _Net) -> None:
        assert fxamp.report(net).graphs


@each_once(
    "change, lowering, skip",
    exhaustive(CHANGES, [_frozen, _assigned, _copied]),
    ["eager", "aot_eager"],
    ["host", "device"],
)
def test_a_changed_model_trains_as_with_torch(change: Change, lowering: str, skip: str) -> None:
    compiled = _Compiled(lowering, skip)
    ours = _trained(change, compiled.scaler, compiled)
    theirs = _trained(change, torch.amp.GradScaler("cpu", init_scale=1024.0), _Trainer())
    torch.testing.assert_close(ours, theirs)
