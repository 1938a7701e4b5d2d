"""A default device is for the program's tensors: fxamp says for each tensor of its own where it belongs."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from support.checks.equality import assert_equal
from support.checks.exhaustive import each_once
from torch import Tensor, nn

import fxamp

STEPS, BAD = 5, 2
ROOT = Path(__file__).parent.parent
FACTORIES = {
    "arange",
    "as_tensor",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "scalar_tensor",
    "tensor",
    "zeros",
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.last(self.norm(self.first(x)).relu()), target)


def trained(elsewhere: str, lowering: str, skip: str, compiled: bool) -> tuple[list[Tensor], float]:
    """Return the weights and the scale after steps on the CPU, one of which overflows, with that default device."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batch = Net(), (torch.randn(6, 8), torch.arange(6) % 4)
    with torch.device(elsewhere):
        scaler = fxamp.GradScaler("cpu", init_scale=2.0**8, skip=skip)
        # Adam of torch 2.11 makes its counts on the default device.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        if compiled:
            fxamp.compile_optimizer(optimizer, "cpu-bfloat16-lean", lowering="aot_eager")
        options: dict[str, Any] = {"policy": "cpu-float16", "lowering": lowering, "scaler": scaler, "nonfinite": "log"}
        model.compile(backend="fxamp", options=options)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(*batch)
            scaler.scale(loss * float("inf") if step == BAD else loss).backward()
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.skipped_steps == 1
        assert fxamp.report(model)
    return [parameter.detach() for parameter in model.parameters()], scaler.loss_scale


@each_once("lowering, skip, compiled", ["eager", "aot_eager"], ["host", "device"], [False, True])
def test_training_does_not_depend_on_the_default_device(lowering: str, skip: str, compiled: bool) -> None:
    expected, scale = trained("cpu", lowering, skip, compiled)
    weights, other_scale = trained("meta", lowering, skip, compiled)
    assert_equal(weights, expected)
    assert other_scale == scale


def factories(folder: Path) -> Iterator[tuple[str, ast.Call]]:
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("torch.") in FACTORIES:
                yield f"{file.relative_to(ROOT)}:{node.lineno}", node


def test_each_tensor_names_its_device() -> None:
    calls = [call for folder in ("fxamp", "passes") for call in factories(ROOT / folder)]
    assert len(calls) > 20
    assert [place for place, call in calls if all(word.arg != "device" for word in call.keywords)] == []
