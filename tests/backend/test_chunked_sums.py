"""A loss in chunks, and a trace of what exists: one gradient of the head's weight, and the gradients of one chunk."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checks.exhaustive import exhaustive
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from fxamp.tools.common.running_ops import RunningOps

ROWS, WIDTH, CLASSES, CHUNK = 24, 6, 50, 4
POLICY = """extends = ["cpu-bfloat16"]

[[rule]]
id = "losses-in-chunks"
ops = ["cross_entropy_loss"]
chunks = {}
gradients = "{}"
"""


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x)), target)


class Existing(RunningOps):
    """After each op: how many results of each shape and dtype exist, that share no memory; ``most`` of them."""

    def __init__(self) -> None:
        super().__init__()
        self._results: list[Any] = []
        self.most: dict[Any, int] = {}

    def ran(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self._results += [weakref.ref(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        memory: dict[Any, set[int]] = {}
        for leaf in (reference() for reference in self._results):
            if leaf is not None:
                memory.setdefault((tuple(leaf.shape), leaf.dtype), set()).add(leaf.untyped_storage().data_ptr())
        self.most.update({kind: max(self.most.get(kind, 0), len(places)) for kind, places in memory.items()})


def compiled(folder: Path, rows: int, gradients: str) -> tuple[Head, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    file, model = folder / "chunks.toml", Head()
    file.write_text(POLICY.format(rows, gradients))
    return model, torch.compile(model, backend="fxamp", options={"policy": str(file), "lowering": "aot_eager"})


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator)


@pytest.mark.parametrize("gradients", exhaustive(["forward", "backward"], always=["backward"]))
def test_one_sum_exists(tmp_path: Path, gradients: str) -> None:
    model, run = compiled(tmp_path, CHUNK, gradients)
    run(*batch()).backward()
    model.zero_grad(set_to_none=True)
    with Existing() as forward:
        loss = run(*batch())
    with Existing() as backward:
        loss.backward()
    making = forward if gradients == "forward" else backward
    assert making.most[(CLASSES, WIDTH), torch.float32] == 1, "a sum beside its next term"
    assert making.most[(CHUNK, CLASSES), torch.bfloat16] <= 2, "logits and gradients of one chunk"


@pytest.mark.parametrize("gradients", exhaustive(["forward", "backward"], always=["backward"]))
def test_gradients_are_those_of_float64_and_of_sums_out_of_place(
    tmp_path: Path, gradients: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for in_place in (True, False):
        if not in_place:
            monkeypatch.setattr("fxamp.passes.partition.add_in_place._sums", lambda _: [])
        model, run = compiled(tmp_path, CHUNK, gradients)
        run(*batch()).backward()
        results.append([parameter.grad for parameter in model.parameters()])
    exact = Head().double()
    exact.load_state_dict(model.state_dict())
    x, target = batch()
    exact(x.double(), target).backward()
    for ours, other, parameter in zip(*results, exact.parameters(), strict=True):
        assert ours is not None and other is not None and parameter.grad is not None
        assert torch.equal(ours, other)
        error = (ours - parameter.grad).norm() / parameter.grad.norm()
        assert error < 2 * torch.finfo(torch.bfloat16).eps


def test_one_chunk_is_the_whole_loss_bit_for_bit(tmp_path: Path) -> None:
    whole, run_whole = compiled(tmp_path, ROWS, "forward")
    loss = run_whole(*batch())
    loss.backward()
    plain = torch.compile(other := Head(), backend="fxamp", options={"policy": "cpu-bfloat16", "lowering": "aot_eager"})
    other.load_state_dict(whole.state_dict())
    expected = plain(*batch())
    expected.backward()
    assert torch.equal(loss, expected)
    for ours, theirs in zip(whole.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
