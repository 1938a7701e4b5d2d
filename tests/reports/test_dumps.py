"""Option "dump" and FXAMP_DUMP: every stage of every graph as text, the same in every run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fxamp
from fxamp.backend.options import parse_options
from fxamp.errors import OptionError
from fxamp.passes.backward.scale_backward import SCALE
from fxamp.reports import dumps


class Broken(torch.nn.Module):
    """Two graphs: the print is a graph break."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.last = torch.nn.Linear(8, 2)

    def forward(self, x):
        hidden = self.norm(self.first(x)).relu()
        print(end="")
        return self.last(hidden).sum()


def train(folder: Path, lowering: str, **options: object) -> Broken:
    torch._dynamo.reset()
    dumps._numbers.clear()
    model = Broken()
    settings = {"policy": "cpu-bfloat16", "lowering": lowering, "dump": folder, **options}
    model.compile(backend="fxamp", options=settings)
    model(torch.ones(3, 4)).backward()
    return model


def texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize(
    ("lowering", "stages"),
    [
        ("eager", {"captured", "cast"}),
        ("aot_eager", {"captured", "cast", "forward", "backward"}),
        pytest.param(
            "inductor",
            {"captured", "cast", "forward", "backward", "forward_kernels", "backward_kernels"},
            marks=[pytest.mark.inductor, pytest.mark.exhaustive],
        ),
    ],
)
def test_two_runs_write_the_same_files_for_every_stage(tmp_path, lowering, stages):
    train(tmp_path / "one", lowering)
    train(tmp_path / "two", lowering)

    written = texts(tmp_path / "one")

    assert set(written) == {f"graph_{number}_{stage}.py" for number in (0, 1) for stage in stages}
    assert written == texts(tmp_path / "two")
    assert all(text.strip() for text in written.values())


def test_a_stage_holds_what_was_decided(tmp_path):
    train(tmp_path, "eager")

    captured = (tmp_path / "graph_0_captured.py").read_text()
    cast = (tmp_path / "graph_0_cast.py").read_text()

    assert "stage=captured" in captured and "bf16" not in captured
    assert "stage=cast policy=cpu-bfloat16 device=cpu" in cast and "ended=" in cast
    assert (
        "module=first class=Linear was=f32 rule=matrix-products at=policies/cpu.toml:8 cast=lower_precision_fp" in cast
    )
    assert 'inserted="for linear: rule matrix-products"' in cast
    assert "code: hidden = self.norm(self.first(x)).relu()" in cast


def test_a_scaled_backward_is_dumped_as_it_is_compiled(tmp_path):
    train(tmp_path, "aot_eager", policy="cpu-float16", scaler=fxamp.GradScaler("cpu"))

    backward = (tmp_path / "graph_0_backward.py").read_text()

    assert f'{SCALE}: "f32[]cpu"' in backward and "return" in backward.splitlines()[-1]
    assert "torch.ops.aten.reciprocal.default" in backward


def test_bytes_kept_for_the_backward_are_those_that_the_forward_returns(tmp_path):
    train(tmp_path, "aot_eager")

    head = (tmp_path / "graph_1_forward.py").read_text().splitlines()[0]
    cast = (tmp_path / "graph_1_cast.py").read_text().splitlines()[0]

    # last(hidden).sum() keeps the bfloat16 copies of the hidden values (3 x 8) and of the weight (2 x 8).
    assert head == f"# fxamp: format=1 graph=1 stage=forward kept_after={2 * (3 * 8 + 2 * 8)}"
    # In float32 it is the hidden values, and the weight is an input.
    assert cast.endswith(f"kept_before=0 kept_after={2 * (3 * 8 + 2 * 8)}")


def test_float32_is_dumped_too(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    monkeypatch.setenv("FXAMP_DUMP", str(tmp_path / "by-environment"))

    torch.compile(lambda a: a @ a, backend="fxamp", options={"lowering": "aot_eager"})(torch.ones(2, 2))

    assert set(texts(tmp_path / "by-environment")) == {"graph_0_captured.py", "graph_0_forward.py"}


def test_an_optimizers_compiled_step_is_a_stage_too(tmp_path, monkeypatch):
    monkeypatch.setenv("FXAMP_DUMP", str(tmp_path))
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)
    scaler = fxamp.GradScaler("cpu", init_scale=4.0, skip="device", step_lowering="aot_eager")

    # The first step makes the state, and is the optimizer's own.
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    (name,) = texts(tmp_path)
    assert name == "graph_0_optimizer.py"
    assert "stage=optimizer" in texts(tmp_path)[name] and "torch.ops.aten.where.self" in texts(tmp_path)[name]
    assert parameter.tolist() == pytest.approx([1 - 0.5 - 0.5 * 1.9] * 3)


def test_dumps_of_an_earlier_run_go_and_other_files_stay(tmp_path):
    (tmp_path / "graph_7_cast.py").write_text("# fxamp: format=1 graph=7 stage=cast\n")
    (tmp_path / "graph_8_cast.py").write_text("mine = 1\n")

    train(tmp_path, "eager")

    assert {"graph_8_cast.py", "graph_0_cast.py"} < set(texts(tmp_path))
    assert "graph_7_cast.py" not in texts(tmp_path)


def test_what_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(OptionError, match=r"option 'dump' is .*file is a file; accepted: a folder"):
        parse_options({"dump": str(tmp_path / "file" / "inside")})
    with pytest.raises(OptionError, match=r"option 'dump' is 3, of type int; accepted: the path of a folder"):
        parse_options({"dump": 3})


@pytest.mark.exhaustive
def test_stages_reach_the_log_and_the_structured_trace(tmp_path):
    program = (
        "import torch\n"
        "options = {'policy': 'cpu-bfloat16', 'lowering': 'eager'}\n"
        "torch.compile(lambda a: a @ a, backend='fxamp', options=options)(torch.ones(2, 2))\n"
    )
    environment = {**os.environ, "TORCH_LOGS": "+fxamp", "TORCH_TRACE": str(tmp_path)}

    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=300
    )

    assert "policy cpu-bfloat16 (named by the caller): 1 ops, 2 casts" in done.stderr
    assert "graph after stage cast:" in done.stderr and "insert-casts: 1 changes" in done.stderr
    lines = [json.loads(line.partition("] ")[2]) for line in _trace(tmp_path) if '"artifact"' in line]
    assert {"fxamp_captured", "fxamp_cast"} <= {line["artifact"]["name"] for line in lines}


def _trace(folder: Path) -> list[str]:
    (file,) = folder.iterdir()
    return [line for line in file.read_text().splitlines() if line.startswith("V")]
