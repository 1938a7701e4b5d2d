"""fxamp-demo on a tiny model: what it trains, prints and draws, and how it refuses."""

import io
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exhaustive import exhaustive
from lacks import needs_gpus

from fxamp.errors import FxampError
from fxamp.optim.precision.packed_tensor import PackedTensor
from fxamp.scaler import GradScaler
from fxamp.tools.demo import command as demo
from fxamp.tools.demo.model import GPT, Size
from fxamp.tools.demo.ranks import Ranks, joined
from fxamp.tools.demo.text import standard_library
from fxamp.tools.demo.train import TrainingResult, train

_QUICK = ["--lowering", "aot_eager", "--steps", "4"]


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    settings, policy = demo._SETTINGS["cpu"]
    tiny = replace(settings, size=replace(settings.size, layers=1, width=16, length=16), batch=2)
    monkeypatch.setitem(demo._SETTINGS, "cpu", (tiny, policy))
    yield
    torch._dynamo.reset()


def _cells(printed: str, row: str) -> list[str]:
    line = next(line for line in printed.splitlines() if line.startswith(row))
    return [cell.strip() for cell in line[len(row) :].split("  ") if cell.strip()]


def test_prints_both_columns_and_draws_both_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "loss.svg"
    assert demo.main([*_QUICK, "--picture", str(picture)]) == 0
    printed, progress = capsys.readouterr()
    assert _cells(printed, "policy") == ["none", "cpu-bfloat16"]
    assert _cells(printed, "why") == ["plain torch.compile", "named by the caller"]
    assert _cells(printed, "graphs") == ["1", "1"]
    casts, ops = int(_cells(printed, "casts inserted")[1]), int(_cells(printed, "ops  ")[1])
    assert 0 < casts < ops
    first = [float(cell) for cell in _cells(printed, "first loss")]
    assert first == pytest.approx([5.545] * 2, abs=0.1)  # ln 256: an untrained model knows nothing
    gap = float(_cells(printed, "loss gap, mean of all steps")[0].split()[0])
    assert gap < 0.01
    assert progress.startswith("text: ") and "step/s" not in progress and "\r" not in progress
    texts = [element.text for element in ET.fromstring(picture.read_text()).iter() if element.text]
    assert {"A small GPT learns Python", "float32", "fxamp, cpu-bfloat16"} <= set(texts)


@pytest.mark.exhaustive
def test_a_float16_policy_trains_with_a_scaler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main([*_QUICK, "--policy", "cpu-float16", "--picture", str(tmp_path / "p.svg")]) == 0
    printed = capsys.readouterr().out
    (scale,), (skipped,) = _cells(printed, "loss scale at the end"), _cells(printed, "skipped steps")
    assert float(scale) == 2.0 ** (16 - int(skipped))
    assert float(_cells(printed, "loss gap, mean of all steps")[0].split()[0]) < 0.1


def test_columns_agree_where_nothing_is_cast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "plain.toml"
    policy.write_text('lower_precision_fp = "bfloat16"\n[match]\ndevice = "cpu"\n')
    assert demo.main([*_QUICK, "--policy", str(policy), "--picture", str(tmp_path / "p.svg")]) == 0
    printed = capsys.readouterr().out
    assert _cells(printed, "loss gap, mean of all steps") == ["0.0000 (0.00%)"]
    assert "Nothing was cast" in printed


def test_the_policy_s_table_decides_how_the_optimizer_s_state_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, optimizers = tmp_path / "state.toml", []
    policy.write_text('lower_precision_fp = "bfloat16"\n[match]\ndevice = "cpu"\n[optimizer]\nstate = "8bit"\n')
    real = demo.compile_optimizer
    monkeypatch.setattr(
        demo, "compile_optimizer", lambda *args, **named: optimizers.append(real(*args, **named)) or optimizers[0]
    )
    assert demo.main([*_QUICK, "--policy", str(policy), "--picture", str(tmp_path / "p.svg")]) == 0
    assert "optimizer of fxamp's column: state 8bit, rounding nearest, weights as-is\n" in capsys.readouterr().err
    (optimizer,) = optimizers
    values = [value for entry in optimizer.state.values() for value in entry.values() if value.dim()]
    assert values and all(type(value) is PackedTensor for value in values)


_TORCHRUN = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def _on_gpus(count: int) -> Any:
    """The parameter "cuda", for machines with so many GPUs: there nccl joins the processes."""
    return pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpus(count)])


@pytest.mark.parametrize("device", ["cpu", _on_gpus(1)])
@pytest.mark.parametrize("kind", exhaustive(["ddp", "fsdp"], always=["fsdp"]))
def test_one_process_of_torchrun_trains_as_a_process_alone(
    kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in _TORCHRUN.items():
        monkeypatch.setenv(name, value)
    settings, text = replace(demo._SETTINGS["cpu"][0], steps=2, device=device), standard_library()

    def trained(ranks: Ranks) -> TrainingResult:
        torch._dynamo.reset()
        scaler = GradScaler(device)
        options = {"policy": f"{device}-float16", "lowering": "eager", "scaler": scaler}
        return train("", settings, text, {"backend": "fxamp", "options": options}, io.StringIO(), scaler, ranks)

    with joined(kind, device, settings.batch) as ranks:
        spread = trained(ranks)
    assert not torch.distributed.is_initialized()
    alone = trained(Ranks())
    assert (spread.losses, spread.held_out, spread.scale) == (alone.losses, alone.held_out, alone.scale)
    assert spread.parameters == alone.parameters and len(spread.records) == (3 if kind == "fsdp" else 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["cpu", _on_gpus(2)])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_of_torchrun_train_as_one(
    kind: str, device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, policy = demo._SETTINGS["cpu"][0], f"{device}-bfloat16"
    monkeypatch.setitem(demo._SETTINGS, device, (replace(tiny, device=device), policy))
    program = tmp_path / "tiny.py"
    program.write_text(
        "from dataclasses import replace\nfrom fxamp.tools.demo import command as demo\n"
        "settings, _ = demo._SETTINGS['cpu']\n"
        "tiny = replace(settings, size=replace(settings.size, layers=1, width=16, length=16), batch=2)\n"
        f"demo._SETTINGS[{device!r}] = replace(tiny, device={device!r}), {policy!r}\nraise SystemExit(demo.main())\n"
    )
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    root = Path(demo.__file__).parents[3]
    finished = subprocess.run(
        [*start, *_QUICK, "--device", device, "--picture", str(tmp_path / "two.svg"), f"--{kind}"],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr.count(f"processes: 2 ({kind})") == 1, "one process of the two reports"
    assert demo.main([*_QUICK, "--device", device, "--picture", str(tmp_path / "one.svg")]) == 0
    one = capsys.readouterr().out
    for row in ("first loss", "last loss, mean of 10 steps", "loss on held-out text"):
        # Printed with four digits: sums in another order move the last one.
        ours, alone = ([float(cell) for cell in _cells(text, row)] for text in (finished.stdout, one))
        assert ours == pytest.approx(alone, abs=1.5e-4), row
    assert (tmp_path / "two.svg").is_file()


@pytest.mark.parametrize(
    ("arguments", "processes", "named"),
    [
        (["--ddp"], None, "torchrun --nproc-per-node 2 $(which fxamp-demo) --ddp"),
        ([], "2", "--ddp or --fsdp"),
        (["--fsdp"], "3", "3 processes cannot share 2 passages"),
    ],
)
def test_processes_that_cannot_train_together_are_refused(
    arguments: list[str],
    processes: str | None,
    named: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if processes is not None:
        monkeypatch.setenv("WORLD_SIZE", processes)
    assert demo.main([*_QUICK, *arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("fxamp-demo: ") and named in message and "Traceback" not in message


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(FxampError, match="machine: 1; accepted: torchrun --nproc-per-node 1"), joined("ddp", "cuda", 2):
        pass


def test_the_text_is_bytes_in_a_fixed_order_and_held_out_files_are_not_trained_on(tmp_path: Path) -> None:
    for index in range(40):
        (tmp_path / f"m{index:02}.py").write_bytes(bytes([65 + index]) * 50)
    text = standard_library(tmp_path)
    assert set(text.held_out.tolist()) == {65 + 19, 65 + 39, 10}
    assert not {65 + 19, 65 + 39} & set(text.train.tolist())
    inputs, targets = text.batch(3, 8, torch.Generator().manual_seed(0))
    assert inputs.shape == targets.shape == (3, 8) and inputs.dtype is torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    with pytest.raises(FxampError, match="at least 41"):
        standard_library(tmp_path, every=41)


def test_the_model_sees_no_future() -> None:
    model = GPT(Size(layers=2, heads=2, width=16, length=8, vocabulary=11))
    embedded = torch.randn(1, 8, 16, requires_grad=True)
    (gradient,) = torch.autograd.grad(model.blocks(embedded)[0, 3].sum(), embedded)
    assert gradient[0, :4].abs().amax(-1).gt(0).all() and gradient[0, 4:].eq(0).all()


def test_without_matplotlib_the_demo_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxamp.tools.common.charts.available", lambda: False)
    assert demo.main(["--lowering", "eager", "--steps", "1", "--picture", str(tmp_path / "loss.svg")]) == 0
    assert "No picture of the loss curves: matplotlib is not installed; pip install" in capsys.readouterr().out
    assert not (tmp_path / "loss.svg").exists()


def test_ctrl_c_prints_what_was_trained_and_writes_no_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fxamp.tools.demo import train

    steps, step = [], train._step

    def third(*arguments: Any) -> torch.Tensor:
        steps.append(1)
        if len(steps) == 7:  # four of float32, then two of fxamp
            raise KeyboardInterrupt
        return step(*arguments)

    monkeypatch.setattr(train, "_step", third)
    assert demo.main([*_QUICK, "--picture", str(tmp_path / "loss.svg")]) == 130
    printed, messages = capsys.readouterr()
    assert printed.startswith("float32: 4 steps, loss ") and "\nfxamp: 2 steps, loss " in printed
    assert messages.endswith("fxamp-demo: interrupted\n") and not list(tmp_path.iterdir())
