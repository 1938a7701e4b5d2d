"""Models that calibrate and bisect can learn nothing from: refused in one line, whichever command reads them."""

from pathlib import Path

import pytest
from policy_runs import run, written

LINEAR = "model = torch.nn.Linear(2, 2)\n"
ONES = LINEAR + "inputs = torch.ones(1, 2)\n"
KEPT = "bisect --tolerance 0.1 --region kept"
COMMANDS = ("calibrate", "bisect --tolerance 0.1")
LAZY = "model = torch.nn.LazyLinear(2)\ninputs = torch.ones(1, 2)"
SCRIPTED = "model = torch.nn.Sequential(torch.jit.script(torch.nn.Linear(2, 2)))\ninputs = torch.ones(1, 2)"

CASES = [
    ("calibrate", LINEAR + "batches = []", "batches holds no batch: there is nothing to calibrate on"),
    ("bisect --tolerance 0.1", LINEAR + "batches = []", "batches holds no batch: there is nothing to measure"),
    ("calibrate", "model = lambda x: x + 1\ninputs = torch.ones(2, requires_grad=True)", "runs nothing of model in"),
    (
        "bisect --tolerance 0.1",
        "model = lambda x: x + 1\ninputs = torch.ones(2, requires_grad=True)",
        "runs nothing of model in",
    ),
    ("calibrate", ONES + "loss = lambda out: out.sum() * 0", "all gradients are zero"),
    ("calibrate", "model = lambda x: x @ x\ninputs = torch.ones(2, 2)", "nothing that requires a gradient"),
    ("bisect --tolerance 0.1", "model = lambda x: x @ x\ninputs = torch.ones(2, 2)", "there are no gradients"),
    ("calibrate", ONES + "loss = lambda out: (out.sum() * 0).log().abs()", "the loss is inf in float32"),
    ("calibrate", "modle = 1\ninputs = 1", "it defines no model (did you mean 'modle'?)"),
    ("bisect --tolerance 0.1", LINEAR, "it defines no batches"),
    ("calibrate", "model = torch.nn.Linear(2, 2).half()\ninputs = torch.ones(1, 2)", "accepted: model.float()"),
    *((command, LAZY, "model, a LazyLinear, has no sizes yet; accepted: a model that was") for command in COMMANDS),
    *((command, SCRIPTED, "module 0 is of torch.jit; accepted: the nn.Module that it") for command in COMMANDS),
    ("calibrate", LINEAR + "batches = [3]", "batch 0 is of type int"),
    ("calibrate", LINEAR + "batches = 3", "batches is of type int"),
    ("calibrate", LINEAR + "1 / 0\ninputs = 1", "model.py:3: ZeroDivisionError"),
    ("calibrate", LINEAR + "inputs = torch.ones(1, 3)", "calling model on batch 0 failed"),
    ("bisect --tolerance 0.1", LINEAR + "inputs = torch.ones(1, 3)", "running model in float64 failed"),
    ("calibrate", ONES + "loss = lambda out: out", "loss(output) is a tensor of shape [1, 2]"),
    ("calibrate", ONES + "loss = 3", "loss is of type int"),
    (
        "bisect --tolerance 0.1 --measure output",
        "model = lambda x: (x @ x) > 1\ninputs = torch.ones(2, 2)",
        "model returns no floating-point tensor",
    ),
    ("bisect --tolerance 0.1 --policy cpu-flot16", LINEAR + "inputs = 1", "did you mean 'cpu-float16'?"),
    (f"{KEPT} --policy cpu-float16", ONES, "has no rules for what is kept for the backward; accepted: a policy"),
    (f"{KEPT} --policy cpu-bfloat16-lean", ONES, "packs and recomputes nothing of what model keeps"),
]


@pytest.mark.parametrize(("line", "text", "message"), CASES)
def test_inputs_without_information_are_refused_in_one_line(
    line: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *options = line.split()
    status, out, err = run(capsys, command, written(tmp_path, f"import torch\n{text}\n"), *options)
    assert (status, out) == (2, "")
    assert message in err.splitlines()[-1] and "Traceback" not in err
