"""Positions under a named policy: transformers switches autocast off for them, but only where it is on."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """The angles of a rotary embedding as a product of frequencies and positions, as in transformers 5.17."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.register_buffer("frequencies", 1000.0 ** -(torch.arange(8) / 8))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """``x``: [length, 8]; ``positions``: int64 [length]."""
        on = torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", enabled=False) if on else nullcontext():
            angles = (self.frequencies[:, None] @ positions[None, :].to(self.frequencies)).T
        return (self.body(x) * angles.cos()).square().sum()


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_a_gradient_is_no_further_from_float64_than_under_autocast(lowering: str) -> None:
    model, x, positions = Rotary(), torch.randn(600, 8), torch.arange(600)

    def gradient(policy: str | None, dtype: torch.dtype = torch.float32, ambient: bool = False) -> Tensor:
        own = model.to(dtype)
        own.zero_grad()
        options = {"policy": policy, "lowering": lowering}
        run = own if policy is None else torch.compile(own, backend="fxamp", options=options)
        with torch.autocast("cpu", torch.bfloat16, enabled=ambient):
            run(x.to(dtype), positions).backward()
        assert own.body.weight.grad is not None
        return own.body.weight.grad.double()

    ours, autocast = gradient("cpu-bfloat16"), gradient(None, ambient=True)
    exact = gradient(None, torch.float64)
    assert (ours - exact).norm() <= 1.1 * (autocast - exact).norm()
