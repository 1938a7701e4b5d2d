"""The code that lean policies run on GPUs, compiled for GPUs that are not here."""

from pathlib import Path

import pytest
from support.machines.inductor_code import generated, kernels, machine_code

PROGRAM = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x):
        return self.last(nn.functional.ACTIVATION(self.first(x))).float().square().mean()

model, inputs = Net(), (torch.zeros(64, 128, requires_grad=True),)
"""


@pytest.mark.inductor
@pytest.mark.exhaustive
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
def test_activations_are_kept_in_what_the_gpu_has(activation: str, capability: int, tmp_path: Path) -> None:
    """Triton has no float8_e4m3fn before capability 8.9, where codes are computed inside the same kernels."""
    pytest.importorskip("triton", reason="machine code needs triton's compiler")
    file = tmp_path / "net.py"
    file.write_text(PROGRAM.replace("ACTIVATION", activation))
    forward, backward = generated(file, "cuda-bfloat16-lean", capability)
    for module in (forward, backward):
        assert ("float8_e4m3fn" in module) is (capability == 90)
        assert ("torch.uint8" in module) is (capability == 80)
        assert "= torch.ops." not in module.partition("async_compile.wait")[2], "no op of torch runs by itself"
        for name, text in kernels(module):
            assert machine_code(name, text, tmp_path, f"sm_{capability}"), name
