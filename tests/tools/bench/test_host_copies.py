"""Copies to host memory in the count of a step: bytes over PCIe, when they run, the peak, and the estimated time."""

from pathlib import Path

import pytest
from support.checks.cost_counting import Counting

from fxamp.tools.bench.cost.count import HOST_COPY, Access, Count, Kernel
from fxamp.tools.bench.cost.rates import Rates
from fxamp.tools.bench.cost.row import extrapolated, row
from fxamp.tools.bench.cost.table import ways
from fxamp.tools.bench.cost.workload import Way, Workload

PROGRAM = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.products = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

    def forward(self, x):
        for product in self.products:
            x = torch.tanh(product(x))
        return x.sum()

model, inputs = Net(), (torch.zeros(4096, 256),)
"""
POLICY = """extends = ["cuda-bfloat16"]

[[rule]]
id = "away"
keep = "host"
region = "kept"
ops = ["tanh"]
"""
VALUE = 2 * 4096 * 256


@pytest.mark.exhaustive
def test_what_goes_to_the_host_is_not_in_use_on_the_gpu(tmp_path: Path, counting: Counting) -> None:
    """Of the results of tanh, one is made, one is copied, and one is read by a product, at most."""
    (tmp_path / "net.py").write_text(PROGRAM)
    (tmp_path / "host.toml").write_text(POLICY)
    workload = Workload(str(tmp_path / "net.py"), dtype="bfloat16", optimizer="none")
    usual, host = (counting(workload, Way(policy)) for policy in ("cuda-bfloat16", str(tmp_path / "host.toml")))
    copies = {stage: host.copied(stage) for stage in ("forward", "backward")}
    assert copies == dict.fromkeys(copies, 5 * VALUE) and usual.copied("forward") == usual.copied("backward") == 0
    assert host.kept_bytes == usual.kept_bytes - 5 * VALUE
    in_use = [[b for b in count.peak.buffers if b.bytes == VALUE] for count in (usual, host)]
    assert len(in_use[0]) >= 6 and len(in_use[1]) <= 4 and all(b.op != "fxamp.send_to_host" for b in in_use[1])
    assert host.peak.bytes <= usual.peak.bytes - 3 * VALUE
    assert sum(buffer.bytes for buffer in host.peak.buffers) == host.peak.bytes
    assert order(host, "forward") == "pcpcpcpcpcp", "each goes as soon as it is made"
    assert order(host, "backward") == "pcpcppcppcppcppp", "each comes while the one before is read"
    assert not host.syncs


def order(count: Count, stage: str) -> str:
    """Products and copies of a graph: ``p`` and ``c``."""
    kinds = [kernel.kind for kernel in count.kernels if kernel.stage == stage]
    return "".join({"matmul": "p", HOST_COPY: "c"}.get(kind, "") for kind in kinds)


def made_up(copied: int) -> Count:
    """A forward of 10 ms and a backward of 30, by the rates below, that copy this many bytes each."""
    kernels = [
        Kernel("forward", "triton", "add", (Access("a", 10, "float32"),), ()),
        Kernel("forward", HOST_COPY, "fxamp.send_to_host.default", (Access("b", copied, "float32"),), ()),
        Kernel("backward", "triton", "add", (Access("c", 20, "float32"),), ()),
        Kernel("backward", HOST_COPY, "fxamp.take_from_host.default", (), (Access("d", copied, "float32"),)),
        Kernel("step", "by hand", "AdamW", (Access("e", 50, "float32"),), ()),
    ]
    return Count(kernels, {"bfloat16": 10})


RATES = Rates(bandwidth=1e3, flops16=1e3, flops32=1e3, host=100)


@pytest.mark.parametrize("copied,waits", [(0, 0), (1, 0), (2, 8), (4, 32)])
def test_time_is_longer_by_what_no_other_kernel_hides(copied: int, waits: int) -> None:
    """A byte takes 10 ms, and 1 ms in the GPU's memory: the forward hides 10 ms + its own, the backward 30."""
    numbers = row("fxamp", "", made_up(copied))
    expected = max(0, 10 * copied - 10 - copied) + max(0, 10 * copied - 30 - copied)
    assert expected == waits
    assert numbers.milliseconds(RATES) == pytest.approx(10 + 30 + 50 + 2 * copied + waits)
    assert (numbers.sent, numbers.taken) == (copied, copied)


def test_copies_extrapolate_over_layers() -> None:
    kernels = made_up(3).kernels
    counts = [Count(kernels * n, {"bfloat16": 10 * n}, {"bfloat16": 4 * n}) for n in (1, 2, 6)]
    rows = [row("fxamp", "", count) for count in counts]
    assert extrapolated((1, 2), rows[:2], 6) == rows[2]


def test_the_table_has_a_column_for_copies_where_there_are_some() -> None:
    plain, copied = (row("fxamp", "", made_up(number)) for number in (0, 10**9))
    assert "host GB" not in ways([plain], RATES, markdown=False)
    assert "host GB" in ways([plain, copied], RATES, markdown=False)
