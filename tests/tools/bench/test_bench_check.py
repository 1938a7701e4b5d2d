"""fxamp-bench check: it finds what is wrong, says what it skips, and goes on after a process that dies."""

import json
import math
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal

from fxamp.tools.bench import command as bench
from fxamp.tools.bench.check import command as check_command
from fxamp.tools.bench.check import training
from fxamp.tools.bench.check.bandwidth import gradient_work, make_gradients
from fxamp.tools.bench.check.check_line import (
    OK,
    SKIPPED,
    WRONG,
    Check,
    Outcome,
    SkippedError,
)
from fxamp.tools.bench.check.checks import checks, run_check
from fxamp.tools.bench.check.program import DRAWS, draw
from fxamp.tools.bench.check.workers import outcomes
from fxamp.tools.bench.check.yardstick import relative_error, require_as_exact
from fxamp.tools.bench.process import ContenderFailed


def outcome(name: str, lowering: str = "eager") -> Outcome:
    every = checks("cpu", lowering)
    return run_check(every, [check.name for check in every].index(name))


def test_it_covers_every_policy_and_way_of_the_device() -> None:
    names = [check.name for check in checks("cuda", "inductor")]
    assert len(set(names)) == len(names)
    for policy in ("cuda-bfloat16", "cuda-float16, scaler", "cuda-bfloat16-lean", "cuda-bfloat16-fp8-rowwise"):
        assert f"gradients {policy}" in names
    for way in ("skip on the device, scaled in the graph", "a whole step in a CUDA graph", "a second GPU as home"):
        assert way in names


@pytest.mark.exhaustive
def test_the_command_prints_outcomes_and_a_sum(capsys: pytest.CaptureFixture[str]) -> None:
    status = bench.main(["check", "--device", "cpu", "--only", "unscale, float", "--only", "2**31", "--json"])
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    statuses = {outcome["name"]: outcome["status"] for outcome in document["checks"]}
    assert status == 0
    assert statuses == {
        "check and unscale, float32": OK,
        "check and unscale, float16": OK,
        "more than 2**31 elements": SKIPPED,
    }
    known = [line.partition(": ")[0] for line in printed.err.splitlines()]
    assert known == [outcome["status"] for outcome in document["checks"]], "each when it is known"
    table = check_command._table(document)
    assert "2 ok" in table and "1 skipped" in table and "a CPU runs torch's own ops" in table
    assert table.splitlines()[-1].startswith("All that could be checked here is right. ")


@pytest.mark.parametrize("name", ["update of the scale", "skip on the device, scaled by the scaler"])
def test_a_wrong_update_of_the_scale_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from fxamp import kernels
    from fxamp.scaler.torch_contract import grad_scaler

    def never_grows(scale: Any, tracker: Any, flag: Any, rule: Any) -> None:
        scale.mul_(torch.where(flag != 0, 0.5, 1.0))

    monkeypatch.setattr(kernels, "update_scale_", never_grows)
    monkeypatch.setattr(grad_scaler, "update_scale_", never_grows)
    assert outcome(name).status == WRONG


def test_a_scaler_that_skips_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = training._ours

    def unscaled(*args: Any) -> Any:
        run = ours(*args)
        run.scaler.step = lambda optimizer: optimizer.step()
        return run

    monkeypatch.setattr(training, "_ours", unscaled)
    assert outcome("skip on the host, scaled by the scaler").status == WRONG


def test_gradients_that_are_wrong_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from fxamp.tools.bench.check import gradients

    compiled = gradients._compiled

    def doubled(*args: Any, **more: Any) -> Any:
        values, report = compiled(*args, **more)
        values[1]["head.bias"] = values[1]["head.bias"] * 2
        return values, report

    assert outcome("gradients cpu-bfloat16").status == OK
    monkeypatch.setattr(gradients, "_compiled", doubled)
    answer = outcome("gradients cpu-bfloat16")
    assert answer.status == WRONG and "accepted" in answer.detail


def test_errors_beyond_the_yardsticks_scatter_are_refused() -> None:
    yardstick = [1.0e-3, 1.1e-3, 0.9e-3, 1.05e-3]
    assert "1.00 of the yardstick" in require_as_exact(yardstick, yardstick)
    for wrong in ([2 * error for error in yardstick], [*yardstick[1:], math.inf]):
        with pytest.raises(AssertionError):
            require_as_exact(wrong, yardstick)
    with pytest.raises(AssertionError, match="there is none"):
        require_as_exact(yardstick, [0.0] * 4)


def test_a_draw_is_the_same_each_time_and_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    first, second = draw(1), draw(1)
    assert torch.equal(before, torch.get_rng_state()) and DRAWS > 1
    assert relative_error(first.truth(), second.truth()) == 0.0


@pytest.mark.parametrize(
    ("error", "status", "detail"),
    [
        (SkippedError("no such unit"), SKIPPED, "no such unit"),
        (AssertionError("off by one"), WRONG, "off by one"),
        (RuntimeError("boom\nmore"), WRONG, "RuntimeError: boom"),
    ],
)
def test_whatever_a_check_raises_is_its_outcome(error: Exception, status: str, detail: str) -> None:
    def run() -> str:
        raise error

    answer = run_check([Check("a check", run)], 0)
    assert (answer.status, answer.detail) == (status, detail)


class Dying:
    """A process whose first one dies in its first check, as of an illegal access on a GPU."""

    opened = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        Dying.opened += 1
        self._dies = Dying.opened == 1

    def ask(self, task: Any, at: int) -> Outcome:
        if self._dies:
            raise ContenderFailed("its process ended: status -11")
        return Outcome(f"check {at}", OK, "", 0.0)

    def kill(self) -> None:
        pass

    close = kill


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_next_check_gets_another_process(
    jobs: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_command, "Process", Dying)
    monkeypatch.setattr(Dying, "opened", 0)
    assert bench.main(["check", "--device", "cpu", "--only", "unscale", "--jobs", str(jobs)]) == 1
    out = capsys.readouterr().out
    assert Dying.opened >= 2 and "status -11" in out
    assert out.splitlines()[-1].startswith("Not ok: check and unscale, float") and "2 ok" in out


def test_what_stops_the_checks_is_raised_and_ends_all_processes() -> None:
    ended: list[int] = []

    class Process(Dying):
        def ask(self, task: Any, at: int) -> Outcome:
            if at == 1:
                raise OSError("no space left")
            return super().ask(task, at)

        def kill(self) -> None:
            ended.append(id(self))

    with pytest.raises(OSError, match="no space"):
        list(outcomes(["a", "b", "c"], range(3), Process, jobs=2))  # type: ignore[arg-type]
    assert ended


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA GeForce RTX 3090", None),
        ("NVIDIA T4", None),
    ],
)
def test_a_gpu_is_compared_with_the_figures_of_its_own_board(name: str, gpu: str | None) -> None:
    pytest.importorskip("triton")
    from fxamp.tools.bench.check.bandwidth import known_gpu

    listed = known_gpu(name)
    assert (listed and listed.name) == gpu


@pytest.mark.exhaustive
def test_every_counted_kernel_is_timed_beside_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU's few elements: the work is the same, and the count needs no GPU."""
    pytest.importorskip("triton")
    from fxamp.tools.bench.check import bandwidth
    from fxamp.tools.bench.cost.kernels.subjects import subjects

    gpu = bandwidth.known_gpu("NVIDIA H200")
    assert gpu is not None and gpu.arch == "sm_90"
    names = {"float16 to float32", "SGD, momentum"}
    monkeypatch.setattr(bandwidth, "subjects", lambda: [subject for subject in subjects() if subject.name in names])
    rows = bandwidth.speeds("cpu", 4096, 1, gpu)
    assert {row["kernel"] for row in rows} == names
    assert all(row["bandwidth"] > 0 and 0 < row["counted"] <= 1 for row in rows)
    assert {row["kernel"] for row in rows if row["of_torch"] is None} == {"SGD, momentum"}
    document = {"date": "2026-11-22", "machine": {}, "seconds": 0.0, "checks": [], "bandwidth": rows}
    assert "of the peak" in check_command._table(document) and "counted" in check_command._table(document)


@pytest.mark.parametrize("target", [torch.float32, None])
def test_torch_does_the_same_work_as_the_kernel_beside_it(target: torch.dtype | None) -> None:
    work = gradient_work(torch.float16, target, "cpu", 5_000)
    ours, theirs = work["kernel"](), work["torch"]()
    if target is not None:
        assert_equal(ours[0], theirs)


@pytest.mark.parametrize("count", [1, 7, 2_000, 5_001])
def test_gradients_hold_all_parameters(count: int) -> None:
    assert sum(gradient.numel() for gradient in make_gradients(count, torch.float32, "cpu")) == count
