"""fxamp-demo on a tiny model: what it trains, prints and draws, and how it refuses."""

import io
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.machines.lacks import needs_gpus

from fxamp.errors import FxampError
from fxamp.optim.packed_tensor import PackedTensor
from fxamp.scaler import GradScaler
from fxamp.tools.common import policy_step
from fxamp.tools.common.step_memory import StepMemory
from fxamp.tools.demo import columns, table
from fxamp.tools.demo import command as demo
from fxamp.tools.demo.ranks import Ranks, joined
from fxamp.tools.demo.sizes import Size
from fxamp.tools.demo.text import VOCABULARY, standard_library
from fxamp.tools.demo.train import TrainingResult, TrainingSettings, train

TINY = TrainingSettings(Size(1, 2, 16, 16, VOCABULARY), batch=2, steps=120, rate=3e-3, device="cpu", seed=0)
_QUICK = ["--lowering", "aot_eager", "--steps", "4"]


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu in ("CPU", "plain CPU"):
        monkeypatch.setitem(demo._USUAL, cpu, (TINY, 1))


def _cells(printed: str, row: str) -> list[str]:
    line = next(line for line in printed.splitlines() if line.startswith(row))
    return [cell.strip() for cell in line[len(row) :].split("  ") if cell.strip()]


def test_prints_three_columns_and_draws_their_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "loss.svg"
    assert demo.main([*_QUICK, "--picture", str(picture)]) == 0
    printed, progress = capsys.readouterr()
    assert _cells(printed, "policy") == ["none", "cpu-bfloat16", "cpu-bfloat16-lean"]
    assert _cells(printed, "why") == ["plain torch.compile", *["named by the caller"] * 2]
    assert _cells(printed, "graphs") == ["1", "1", "1"]
    casts, ops = int(_cells(printed, "casts inserted")[1]), int(_cells(printed, "ops  ")[1])
    assert 0 < casts < ops
    first = [float(cell) for cell in _cells(printed, "first loss")]
    assert first == pytest.approx([5.545] * 3, abs=0.1)  # ln 256: an untrained model knows nothing
    gaps = [float(cell.split()[0]) for cell in _cells(printed, "loss gap, mean of all steps")]
    assert len(gaps) == 2 and max(gaps) < 0.01
    unused = "optimizer of fxamp lean: state 8bit, rounding stochastic, weights as-is, in use with --policy-optimizer\n"
    assert unused in progress
    for row in ("peak memory", "kept for the backward", "steps/s, median"):
        first, *others = _cells(printed, row)
        assert len(others) == 2, row
        for cell in others:
            number, ratio = (float(part.strip("(").split()[0]) for part in cell.split("("))
            assert ratio == pytest.approx(number / float(first.split()[0]), rel=0.1), row
    assert progress.startswith("text: ") and "step/s" not in progress and "\r" not in progress
    texts = [element.text for element in ET.fromstring(picture.read_text()).iter() if element.text]
    lines = ["float32", "fxamp, cpu-bfloat16", "fxamp lean, cpu-bfloat16-lean"]
    assert {"A small GPT learns Python", *lines} <= set(texts)


@pytest.mark.exhaustive
@pytest.mark.parametrize("native", [True, False])
def test_the_last_line_states_the_gain_in_a_sentence(
    native: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "native_bfloat16", lambda device: native)
    monkeypatch.setattr(demo, "native_bfloat16", lambda device: native)
    assert demo.main(["--lowering", "eager", "--steps", "1", "--picture", str(tmp_path / "loss.svg")]) == 0
    printed = capsys.readouterr().out
    last = printed.splitlines()[-1]
    kept = _cells(printed, "kept for the backward")[2].split("(")[1].split()[0]
    losses = ", ".join(f"{float(cell):.2f}" for cell in _cells(printed, "loss on held-out text"))
    assert f"a lean policy keeps activations in {kept} of float32's memory" in last
    assert last.endswith(f"(loss on unseen text: {losses}).") and last.count(". ") == 0
    if native:
        assert last.startswith("One changed line trains this GPT ")
    else:
        assert last.startswith(
            "This CPU has no units for bfloat16 (avx512_bf16, amx_bf16), so 16 bits cannot be faster"
        )


@pytest.mark.parametrize(("rate", "fast"), [(6.0, "1.5 times as fast as float32"), (3.0, "at 0.75 of float32's speed")])
def test_the_last_line_states_the_speed(rate: float, fast: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "native_bfloat16", lambda device: True)
    monkeypatch.setattr(table, "_casts", lambda run: 1)
    memory = StepMemory(lasting=10, step=20, kept=8, how="a count")
    reference = TrainingResult("float32", (2.0,), 2.0, 1, compiling=1.0, rate=4.0, memory=memory)
    lean = replace(reference, memory=replace(memory, kept=2))
    said = table.verdict([reference, replace(reference, rate=rate), lean], "cpu")
    assert said.startswith(f"One changed line trains this GPT {fast}, and a lean policy keeps activations in 0.25 of ")


def test_a_cpu_with_units_for_bfloat16_trains_a_model_whose_products_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    chosen = {}
    for native in (True, False):
        monkeypatch.setattr(demo, "native_bfloat16", lambda device, native=native: native)
        settings, threads, policy = demo._chosen(demo._parser().parse_args([]))
        chosen[native] = settings.size.width, threads, policy
    assert chosen == {True: (512, torch.get_num_threads(), "cpu-bfloat16"), False: (64, 1, "cpu-bfloat16")}


@pytest.mark.parametrize(
    ("policy", "lean"),
    [("cpu-float16", "cpu-float16-lean"), ("cpu-bfloat16-lean", "cpu-bfloat16-leanest"), ("auto", "cpu-bfloat16-lean")],
)
def test_the_third_column_is_the_lean_policy_of_the_second_s_dtype(
    policy: str, lean: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "native_bfloat16", lambda device: True)
    float32, plain, third = columns.columns_of(policy, "cpu", "eager", optimizer=False)
    assert (float32.policy, plain.policy, third.policy) == (None, policy, lean)
    assert (plain.lowering, third.lowering) == ("eager", "aot_eager")


@pytest.mark.exhaustive
def test_a_float16_policy_trains_with_a_scaler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main([*_QUICK, "--policy", "cpu-float16", "--picture", str(tmp_path / "p.svg")]) == 0
    printed = capsys.readouterr().out
    scales, skipped = _cells(printed, "loss scale at the end"), _cells(printed, "skipped steps")
    assert [float(scale) for scale in scales] == [2.0 ** (16 - int(count)) for count in skipped] and len(scales) == 2
    assert float(_cells(printed, "loss gap, mean of all steps")[0].split()[0]) < 0.1


@pytest.mark.exhaustive
def test_columns_agree_where_nothing_is_cast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "plain.toml"
    policy.write_text('lower_precision_fp = "bfloat16"\n[match]\ndevice = "cpu"\n')
    assert demo.main([*_QUICK, "--policy", str(policy), "--picture", str(tmp_path / "p.svg")]) == 0
    printed = capsys.readouterr().out
    assert _cells(printed, "loss gap, mean of all steps")[0] == "0.0000 (0.00%)"
    assert printed.splitlines()[-1].startswith("Nothing was cast")


@pytest.mark.exhaustive
def test_the_policy_s_table_decides_how_the_optimizer_s_state_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, optimizers = tmp_path / "state.toml", []
    policy.write_text('lower_precision_fp = "bfloat16"\n[match]\ndevice = "cpu"\n[optimizer]\nstate = "8bit"\n')
    real = policy_step.compile_optimizer
    monkeypatch.setattr(
        policy_step,
        "compile_optimizer",
        lambda *args, **named: optimizers.append(real(*args, **named)) or optimizers[-1],
    )
    line = [*_QUICK, "--policy", str(policy), "--policy-optimizer", "--picture", str(tmp_path / "p.svg")]
    assert demo.main(line) == 0
    assert "optimizer of fxamp: state 8bit, rounding nearest, weights as-is\n" in capsys.readouterr().err
    optimizer, _ = optimizers
    values = [value for entry in optimizer.state.values() for value in entry.values() if value.dim()]
    assert values and all(type(value) is PackedTensor for value in values)


_TORCHRUN = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def _on_gpus(count: int) -> Any:
    """The parameter "cuda", for machines with this many GPUs: there nccl joins the processes."""
    return pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpus(count)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["cpu", _on_gpus(1)])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_one_process_of_torchrun_trains_as_a_process_alone(
    kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in _TORCHRUN.items():
        monkeypatch.setenv(name, value)
    settings, text = replace(TINY, steps=2, device=device), standard_library()

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
    assert len(spread.records) == (3 if kind == "fsdp" else 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["cpu", _on_gpus(2)])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_of_torchrun_train_as_one(
    kind: str, device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = f"{device}-bfloat16"
    monkeypatch.setitem(demo._USUAL, "GPU", (replace(TINY, device="cuda"), 1))
    program = tmp_path / "tiny.py"
    program.write_text(
        "from dataclasses import replace\nfrom fxamp.tools.demo import command as demo\n"
        "settings, _ = demo._USUAL['plain CPU']\n"
        "tiny = replace(settings, size=replace(settings.size, layers=1, heads=2, width=16, length=16), batch=2)\n"
        f"demo._USUAL.update(dict.fromkeys(demo._USUAL, (replace(tiny, device={device!r}), 1)))\n"
        "raise SystemExit(demo.main())\n"
    )
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    root = Path(demo.__file__).parents[3]
    finished = subprocess.run(
        [*start, *_QUICK, "--device", device, "--policy", policy, "--picture", str(tmp_path / "two.svg"), f"--{kind}"],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr.count(f"processes: 2 ({kind})") == 1, "one process of the two reports"
    assert demo.main([*_QUICK, "--device", device, "--policy", policy, "--picture", str(tmp_path / "one.svg")]) == 0
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


@pytest.mark.exhaustive
def test_without_matplotlib_the_demo_names_the_package_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxamp.tools.common.charts.available", lambda: False)
    assert demo.main(["--lowering", "eager", "--steps", "1", "--picture", str(tmp_path / "loss.svg")]) == 0
    assert "No picture of the loss curves: matplotlib is not installed; pip install" in capsys.readouterr().out
    assert not (tmp_path / "loss.svg").exists()


@pytest.mark.exhaustive
def test_ctrl_c_prints_what_was_trained_and_writes_no_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fxamp.tools.demo import train

    steps, finish = [], train._finish

    def third(*arguments: Any) -> None:
        steps.append(1)
        if len(steps) == 8:  # four of float32 and one for its memory, then two of fxamp
            raise KeyboardInterrupt
        finish(*arguments)

    monkeypatch.setattr(train, "_finish", third)
    assert demo.main([*_QUICK, "--picture", str(tmp_path / "loss.svg")]) == 130
    printed, messages = capsys.readouterr()
    assert printed.startswith("float32: 4 steps, loss ") and "\nfxamp: 2 steps, loss " in printed
    assert messages.endswith("fxamp-demo: interrupted\n") and not list(tmp_path.iterdir())
