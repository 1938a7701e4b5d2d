"""Every optimizer that can skip on the device does as eager optimizers under torch.amp.GradScaler do."""

import logging

import pytest
import torch
from support.checks.exhaustive import exhaustive
from support.oracles.guarded_runs import (
    SCENARIOS,
    Training,
    assert_agree,
    by_torch,
    compilations,
    on_device,
    saved,
)
from support.programs.every_optimizer import ARGUMENTS, OPTIMIZERS, SPARSE_ONLY, Make, arguments_of_step, make
from support.programs.user_optimizers import Counting, Differencing, OnTheHost, Remembering

from fxamp.tools.bench.host_syncs import HostReads

# Why the host has to decide for the others.
REASONS = {
    "Adafactor": "reads the norm of a parameter on the host to choose its step's size",
    "LBFGS": "its step calls a closure, which only the host can",
}
VARIANTS: dict[str, Make] = {
    "SGD, nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD, maximize": lambda p: torch.optim.SGD(p, lr=0.1, maximize=True),
    "AdamW, foreach, amsgrad, maximize": lambda p: torch.optim.AdamW(p, amsgrad=True, maximize=True, foreach=True),
    "AdamW, lr tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "NAdam, foreach, decoupled": lambda p: torch.optim.NAdam(
        p, weight_decay=0.1, decoupled_weight_decay=True, foreach=True
    ),
    "RMSprop, foreach": lambda p: torch.optim.RMSprop(p, foreach=True, momentum=0.9),
    "Adagrad, lr_decay": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "groups": lambda p: torch.optim.AdamW([{"params": p[:1], "lr": 0.1, "weight_decay": 0.0}, {"params": p[1:]}]),
    "a user's own": Counting,
    "a user's own, first step unlike the others": Differencing,
}
TRACED = {name: make for name, make in OPTIMIZERS.items() if name not in REASONS} | VARIANTS


def trained(make: Make, scenario: str, lowering: str = "aot_eager") -> Training:
    return Training(make, on_device(lowering)).run(SCENARIOS[scenario])


# torch's own fused SGD takes in memory that a skipped first step left unwritten.
REFERENCES: dict[str, Make] = {
    "fused SGD": OPTIMIZERS["SGD"],
}


def reference(make: Make, scenario: str) -> Training:
    return Training(make, by_torch()).run(SCENARIOS[scenario])


def exact(make: Make, scenario: str) -> Training:
    return Training(make, by_torch(), torch.float64).run(SCENARIOS[scenario])


def test_the_table_holds_every_optimizer() -> None:
    assert set(ARGUMENTS) - set(REASONS) <= set(TRACED)
    assert {"SparseAdam"} == SPARSE_ONLY


def _is_usual(name: str, scenario: str) -> bool:
    """Whether it runs by default: every scenario of one optimizer, and one scenario of each optimizer's first form."""
    return name == "AdamW" or (name in ARGUMENTS and scenario == "clipping")


# Every scenario for every optimizer in its first form; for the others those that go through everything.
RUNS = [
    pytest.param(name, scenario, marks=[] if _is_usual(name, scenario) else pytest.mark.exhaustive)
    for name in TRACED
    for scenario in SCENARIOS
    if name in ARGUMENTS or scenario in ("skipped first", "clipping")
]


def host_reads(training: Training) -> int:
    """How many values the host reads in two more steps, of which one is skipped."""
    count = 0
    for step in (2, 3):
        training.optimizer.zero_grad()
        training.backward(step, SCENARIOS["skipped later"])
        with HostReads() as reads:
            training.scaler.clip_grad_norm_(training.optimizer, 1.0)
            training.scaler.step(training.optimizer)
            training.scaler.update()
            training.scaler.poll_steps()
        count += reads.count
    return count


@pytest.mark.parametrize("name, scenario", RUNS)
def test_it_agrees_with_torch_and_reads_nothing_on_the_host(name: str, scenario: str) -> None:
    make = REFERENCES.get(name, TRACED[name])
    ours, theirs = trained(TRACED[name], scenario), reference(make, scenario)
    assert_agree(ours, theirs, exact(make, scenario))
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-6, nan_ok=True)
    assert compilations(ours) == 1
    assert scenario != "clipping" or host_reads(ours) == 0


UNDER_INDUCTOR = ["AdamW", "SGD", "Adagrad", "foreach AdamW", "a user's own"]


@pytest.mark.inductor
@pytest.mark.parametrize("name", exhaustive(UNDER_INDUCTOR, always=["AdamW"]))
def test_it_agrees_with_torch_under_inductor(name: str) -> None:
    ours = trained(TRACED[name], "clipping", "inductor")
    assert_agree(ours, reference(TRACED[name], "clipping"), exact(TRACED[name], "clipping"))
    assert compilations(ours) == 1


def test_the_counter_sees_a_host_that_decides() -> None:
    training = Training(TRACED["RMSprop"], by_torch())
    training.optimizer.zero_grad()
    training.backward(0, SCENARIOS["clean"])
    with HostReads() as reads:
        training.scaler.step(training.optimizer)
    assert reads.count > 0


@pytest.mark.parametrize("name", REASONS)
def test_the_host_decides_for_the_others_and_logs_it_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    training = Training(OPTIMIZERS[name], on_device())
    with caplog.at_level(logging.WARNING, logger="fxamp.optim"):
        for step in range(3):
            training.backward(step, SCENARIOS["skipped first"])
            before = [parameter.detach().clone() for parameter in training.parameters]
            training.scaler.step(training.optimizer, *arguments_of_step(training.optimizer))
            training.scaler.update()
            moved = any(not torch.equal(p, q) for p, q in zip(training.parameters, before, strict=True))
            assert moved is (step == 2)
            training.optimizer.zero_grad()
    (record,) = caplog.records
    assert name in record.message and "the host decides" in record.message


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name != "clipping"])
@pytest.mark.parametrize("name", ["LBFGS", *SPARSE_ONLY])
def test_what_the_host_decides_is_the_eager_step_itself(name: str, scenario: str) -> None:
    kind, sparse = make(name, ARGUMENTS.get(name, {})), name in SPARSE_ONLY
    ours, theirs = (
        Training(kind, training(), sparse=sparse).run(SCENARIOS[scenario]) for training in (on_device, by_torch)
    )
    assert ours.scales == theirs.scales and saved(ours).keys() == saved(theirs).keys()
    assert all(torch.equal(value, saved(theirs)[key]) for key, value in saved(ours).items())


@pytest.mark.parametrize("make, why", [(OnTheHost, "(user_optimizers.py:"), (Remembering, "'calls'")])
def test_a_user_s_optimizer_that_no_graph_can_hold_is_left_to_the_host(
    make: Make, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = Training(make, on_device()), Training(make, by_torch())
    for training in (ours, theirs):
        training.run(SCENARIOS["skipped first"])
    assert_agree(ours, theirs, None)
    assert [why in record.message for record in caplog.records if record.name.startswith("fxamp.optim")] == [True]
    assert getattr(ours.optimizer, "calls", 0) == getattr(theirs.optimizer, "calls", 0)
