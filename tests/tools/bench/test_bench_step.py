"""fxamp-bench step on a few parameters: who compiles, what is printed, and that all make the same step."""

import json
import math
from dataclasses import replace
from itertools import islice

import pytest
import torch

from fxamp.optim import CompiledOptimizer
from fxamp.policy import Policy
from fxamp.tools.bench import command as bench
from fxamp.tools.bench.train.experiment import OPTIMIZERS, PARAMETERS, STEPPERS, Experiment
from fxamp.tools.bench.train.stepping import Stepping, shapes_of_gpt2

PLAN = Experiment(PARAMETERS, "", "cpu", lowering="aot_eager", changed={"tensors": 6, "width": 1})


def test_148_parameters_of_768_are_gpt_2s() -> None:
    assert sum(map(math.prod, islice(shapes_of_gpt2(768), 148))) == 124_439_808


@pytest.mark.exhaustive
def test_a_contender_runs_in_a_process_and_reports_its_cost(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--parameters 6 --width 1 --contenders fxamp --rounds 2 --steps 1 --lowering aot_eager"
    assert bench.main(["step", *options.split(), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (row,) = document["contenders"]
    assert (row["name"], document["experiment"]["changed"], row["failed"]) == ("fxamp", PLAN.changed, "")
    assert row["cold"] > 0 < row["warm_cpu"] and row["observed"]["host_syncs"] == 0
    assert [len(rounds) for rounds in row["seconds"]] == [2, 2] and min(map(min, row["seconds"])) > 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_steps_and_the_row_names_the_implementation(optimizer: str) -> None:
    stepping = Stepping(replace(PLAN, optimizer=optimizer), STEPPERS["fxamp"])
    for _ in range(2):
        stepping.step()
    assert bool(stepping.notes) is (optimizer == "Adafactor") and not stepping.losses


def test_all_make_the_same_step() -> None:
    ends = {}
    for name, contender in STEPPERS.items():
        torch._dynamo.reset()
        stepping = Stepping(PLAN, contender)
        for _ in range(3):
            stepping.step()
        ends[name] = list(stepping.module)
        if name == "fxamp":
            assert CompiledOptimizer.of(stepping.optimizer).compilations == 1
    first, *others = ends.values()
    for other in others:
        torch.testing.assert_close(first, other, rtol=4 * torch.finfo(torch.float32).eps, atol=0)


def test_a_policy_s_state_is_stepped(capsys: pytest.CaptureFixture[str]) -> None:
    plan = replace(PLAN, policies=("cpu-bfloat16-lean",))
    stepping = Stepping(plan, plan.contenders["cpu-bfloat16-lean"])
    stepping.step()
    precision = CompiledOptimizer.of(stepping.optimizer).precision
    assert precision is not None and precision.table == Policy.load("cpu-bfloat16-lean").optimizer
    assert bench.main(["step", "--policy", "cpu-bfloat16"]) == 2
    assert "its [optimizer] table changes nothing" in capsys.readouterr().err


def test_a_contender_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("fxamp.tools.bench.train.worker.start", math.sqrt)
    assert bench.main(["step", "--parameters", "6", "--contenders", "fused", "--markdown"]) == 1
    assert "torch, fused=True failed: TypeError: " in capsys.readouterr().out
