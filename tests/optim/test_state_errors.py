"""How exact a step is whose state is kept in 8 bits, and in how many bytes, compared with torchao's."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from fxamp.graph import inner_tensors
from fxamp.optim.packed_tensor import PackedTensor
from fxamp.policy import Policy

IN_8_BITS = Policy.loads('extends = ["cpu-bfloat16"]\n[optimizer]\nstate = "8bit"\n')


def kept_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of the state's tensors, and of the tensors inside of them."""
    values = [value for entry in optimizer.state.values() for value in entry.values()]
    parts = [value.parts if isinstance(value, PackedTensor) else inner_tensors(value) for value in values]
    return sum(part.nbytes for source in parts for part in source)


def floats(exponent: int, mantissa: int) -> Tensor:
    """The values below 2 of a small float with this many bits, as ``policies/README.md`` describes the codes."""
    steps = torch.arange(2**mantissa, dtype=torch.float64) / 2**mantissa
    least = 2 - 2**exponent
    return torch.cat([steps * 2.0**least, *((1 + steps) * 2.0**power for power in range(least, 1))])


def nearest(values: Tensor, table: Tensor, powers: bool) -> Tensor:
    """``values`` in blocks of 256, each as the nearest of ``table`` times its block's scale.

    The scale is the largest of the block; ``powers``: the power of two that this has.
    """
    blocks = values.view(-1, 256)
    scales = blocks.abs().amax(1, keepdim=True)
    scales = torch.exp2(torch.floor(torch.log2(scales))) if powers else scales
    table = table.sort().values
    within = blocks / scales
    above = torch.searchsorted(table, within.contiguous()).clamp(1, len(table) - 1)
    low, high = table[above - 1], table[above]
    return (torch.where(within - low < high - within, low, high) * scales).view(values.shape)


class Rounded(torch.optim.AdamW):
    """AdamW whose moments are as ``round_first`` and ``round_second`` leave them after each step."""

    def __init__(self, own: list[Tensor], round_first: Any, round_second: Any) -> None:
        super().__init__(own, lr=0.01)
        self.rounds = {"exp_avg": round_first, "exp_avg_sq": round_second}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for entry in self.state.values():
            for name, rounded in self.rounds.items():
                entry[name].copy_(rounded(entry[name]))


def our_codes(own: list[Tensor]) -> torch.optim.Optimizer:
    magnitudes, second = floats(3, 4), floats(5, 3)
    first = torch.cat([magnitudes, -magnitudes])
    least = second[1]

    def above_zero(values: Tensor) -> Tensor:
        """What is above 0 stays so."""
        blocks = values.view(-1, 256)
        scales = torch.exp2(torch.floor(torch.log2(blocks.amax(1, keepdim=True))))
        rounded = nearest(values, second, True).view(-1, 256)
        return torch.where((rounded == 0) & (blocks > 0), least * scales, rounded).view(values.shape)

    return Rounded(own, lambda values: nearest(values, first, True), above_zero)


@pytest.mark.exhaustive
@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore")
def test_8_bit_state_is_as_exact_as_its_codes_are_and_takes_fewer_bytes_than_torchaos() -> None:
    """Twenty steps, gradients over four decades. The oracle is AdamW in float64 whose state is rounded to the codes.

    torchao's error is shown beside it (``-s``): its codes are finer near the largest of a block, and take a table.
    """
    low_bit = pytest.importorskip("torchao.optim")
    makes: dict[str, tuple[Any, torch.dtype]] = {
        "exact": (lambda own: torch.optim.AdamW(own, lr=0.01), torch.float64),
        "float32": (lambda own: torch.optim.AdamW(own, lr=0.01), torch.float32),
        "codes": (our_codes, torch.float64),
        "torchao": (lambda own: low_bit.AdamW8bit(own, lr=0.01), torch.float32),
        "ours": (
            lambda own: fxamp.compile_optimizer(torch.optim.AdamW(own, lr=0.01), IN_8_BITS),
            torch.float32,
        ),
    }
    finals, held = {}, {}
    for name, (make, dtype) in makes.items():
        weight = nn.Parameter(torch.randn(65_536, generator=torch.Generator().manual_seed(0)).to(dtype))
        optimizer = make([weight])
        for seed in range(20):
            gradient = torch.randn(65_536, generator=torch.Generator().manual_seed(seed + 1))
            weight.grad = (gradient * torch.logspace(-6, -2, 65_536)).to(dtype)
            optimizer.step()
        finals[name], held[name] = weight.detach().double(), kept_bytes(optimizer)
    errors = {name: float((final - finals["exact"]).square().mean().sqrt()) for name, final in finals.items()}
    print({name: (errors[name], held[name] / 65_536) for name in ("ours", "torchao")})
    assert 0 < errors["ours"] <= errors["codes"] + errors["float32"], errors
    assert held["ours"] <= held["torchao"], held
