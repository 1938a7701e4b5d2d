"""Recurrent layers inside of a graph, with Dynamo's setting to capture them."""

import copy

import pytest
import torch
from support.checks.equality import assert_equal
from torch import Tensor, nn

from fxamp.passes.forward import expand_composites

pytestmark = pytest.mark.filterwarnings("ignore:.*")


class Net(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(4, 4, num_layers=2, bidirectional=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x)[0])
        return out


def trained(model: nn.Module, x: Tensor, autocast: bool, **how: object) -> list[Tensor]:
    """The result and the gradients of a copy of ``model``, compiled as ``how`` says."""
    torch._dynamo.reset()
    twin = copy.deepcopy(model)
    call = torch.compile(twin, **how) if how else twin  # type: ignore[call-overload]
    with (
        torch._dynamo.config.patch(allow_rnn=True),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        result = call(x)
    result.float().square().sum().backward()
    return [result.detach().float(), *(parameter.grad for parameter in twin.parameters() if parameter.grad is not None)]


KINDS = pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])


@KINDS
def test_a_recurrent_layer_runs_in_the_kernels_of_eager_mode(kind: type[nn.RNNBase]) -> None:
    model, x = Net(kind), torch.randn(3, 2, 4)
    ours = trained(model, x, False, backend="fxamp", options={"policy": "cpu-bfloat16", "lowering": "eager"})
    assert len(ours) == 1 + len([*model.parameters()])
    assert_equal(ours, trained(model, x, True))


@KINDS
@pytest.mark.exhaustive
@pytest.mark.parametrize("lowering", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_recurrent_layer_trains_through_aotautograd(kind: type[nn.RNNBase], lowering: str) -> None:
    """No further from float32 than twice the error of eager autocast without oneDNN's kernel."""
    model, x = Net(kind), torch.randn(3, 2, 4)
    ours = trained(model, x, False, backend="fxamp", options={"policy": "cpu-bfloat16", "lowering": lowering})
    with torch.backends.mkldnn.flags(enabled=False):
        theirs, exact = trained(model, x, True), trained(model, x, False)
    assert len(ours) == len(exact)
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert (a - c).norm() <= 2 * (b - c).norm()


def test_an_lstm_that_onednn_has_no_kernel_for_runs_as_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager autocast raises for it; it computes the cells where the input is narrow before."""
    monkeypatch.setattr(expand_composites, "onednn_computes", lambda dtype: False)
    model, x = Net(nn.LSTM), torch.randn(3, 2, 4)
    ours = trained(model, x, False, backend="fxamp", options={"policy": "cpu-bfloat16", "lowering": "eager"})
    with torch.backends.mkldnn.flags(enabled=False):
        assert_equal(ours, trained(model, x, True))


def test_an_lstm_of_any_number_of_rows_runs_as_cells() -> None:
    """oneDNN's kernel is traced with numbers alone."""
    model, x = Net(nn.LSTM), torch.randn(3, 2, 4)
    how = {"backend": "fxamp", "dynamic": True, "options": {"policy": "cpu-bfloat16", "lowering": "eager"}}
    ours = trained(model, x, False, **how)
    with torch.backends.mkldnn.flags(enabled=False):
        assert_equal(ours, trained(model, x, True))
        assert not torch.equal(ours[0], trained(model, x, False)[0])


class InARegion(nn.Module):
    """Autocast is off for the layer, and on for the head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)[0]
        with torch.autocast("cpu", torch.bfloat16):
            return self.head(out)  # type: ignore[no-any-return]


def test_an_lstm_of_any_number_of_rows_keeps_its_kernel_where_autocast_is_off() -> None:
    model, x = InARegion(), torch.randn(3, 2, 4)
    ours = trained(model, x, False, backend="fxamp", dynamic=True, options={"policy": "auto", "lowering": "eager"})
    assert len(ours) == 1 + len([*model.parameters()])
    assert_equal(ours, trained(model, x, False))
