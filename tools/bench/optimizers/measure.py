"""Measures one optimizer's row: every scenario with each scaler, then the counts of a steady step."""

from dataclasses import dataclass, replace

import torch

from fxamp.optim import guarded
from fxamp.tools.bench.optimizers.agreement import agreement
from fxamp.tools.bench.optimizers.exact import train_exactly
from fxamp.tools.bench.optimizers.host_syncs import host_syncs
from fxamp.tools.bench.optimizers.optimizers import Choice, make
from fxamp.tools.bench.optimizers.result import FAILS, NOT_IN_TORCH, Cell, Moved, Pair, Reference, Row
from fxamp.tools.bench.optimizers.scenario import SCENARIOS, Scenario
from fxamp.tools.bench.optimizers.training import Training, by_torch, on_device
from fxamp.tools.bench.traffic import counted_traffic
from fxamp.tools.common.unlogged import unlogged

#: Large enough that 0-dim counters and factors do not show in the bytes per parameter.
SHAPES = ((64, 32),) * 3
#: The scenarios after which steps are counted.
PLAIN, CLIPPED = "clean", "clipping"
#: From this step on, every optimizer does the same in each step: RAdam divides by a variance after five steps.
STEADY = 10


@dataclass(frozen=True)
class Setup:
    """``device``: "cpu" or "cuda"; ``lowering``: of fxamp's compiled steps."""

    device: str
    lowering: str


@dataclass(frozen=True)
class _Outcome:
    """A scenario's cell with its trainings; None for a training that failed."""

    cell: Cell
    torch: Training | None = None
    fxamp: Training | None = None


def measure(name: str, choice: Choice, setup: Setup) -> Row:
    """Train ``choice`` through every scenario, and count the bytes and host syncs of a step."""
    # Why the host decides stands in the row; the log would say it for each scenario again.
    with unlogged("fxamp.optim"):
        return _measure(name, choice, setup)


def _measure(name: str, choice: Choice, setup: Setup) -> Row:
    outcomes = {each: _run(choice, scenario, setup) for each, scenario in SCENARIOS.items()}
    trained = [outcome.fxamp for outcome in outcomes.values() if outcome.fxamp is not None]
    steps = [guarded(training.optimizer, setup.lowering) for training in trained]
    reasons = tuple(dict.fromkeys(why for step in steps for why in step.refusals))
    compiled = all(step.compilations for step in steps) and not reasons
    return Row(
        name=name,
        label=str(choice),
        decided_by=("device" if compiled else "host") if trained else "-",
        reasons=reasons,
        scenarios={each: outcome.cell for each, outcome in outcomes.items()},
        step=_counted(outcomes[PLAIN], SCENARIOS[PLAIN]),
        clipped=_counted(outcomes[CLIPPED], SCENARIOS[CLIPPED]),
    )


def cheapest_of_torch(setup: Setup) -> Reference:
    """Count a step of torch's scaler with fused AdamW."""
    fused = make("AdamW", {"fused": True})
    scenarios = (SCENARIOS[PLAIN], SCENARIOS[CLIPPED])
    plain, clipped = (_count(_by_torch(fused, setup).run(scenario), scenario) for scenario in scenarios)
    return Reference(plain, clipped)


def _run(choice: Choice, scenario: Scenario, setup: Setup) -> _Outcome:
    """Train both ways. A failure of torch is not a failure of fxamp; one of fxamp alone is a result of the row."""
    try:
        theirs = _by_torch(choice, setup).run(scenario)
        exact = train_exactly(_by_torch(choice, setup, torch.float64), scenario)
    except Exception as error:
        return _Outcome(Cell(NOT_IN_TORCH, _line(error)))
    try:
        scaler = on_device(setup.lowering, setup.device)
        ours = Training(choice, scaler, device=setup.device, shapes=SHAPES, sparse=choice.sparse).run(scenario)
    except Exception as error:
        return _Outcome(Cell(FAILS, _line(error)), theirs)
    found = agreement(ours, theirs, exact)
    return _Outcome(Cell(found.word, found.where), theirs, ours)


def _by_torch(choice: Choice, setup: Setup, dtype: torch.dtype = torch.float32) -> Training:
    return Training(choice, by_torch(setup.device), dtype, setup.device, SHAPES, choice.sparse)


def _counted(outcome: _Outcome, scenario: Scenario) -> Pair:
    ours, theirs = (None if each is None else _count(each, scenario) for each in (outcome.fxamp, outcome.torch))
    return Pair(torch=theirs, fxamp=ours)


def _count(training: Training, scenario: Scenario) -> Moved:
    """Run more steps after the scenario; count host syncs in the second to last and bytes in the last."""
    ahead = replace(scenario, bad=())
    training.run(ahead, steps=range(scenario.steps, STEADY))
    training.optimizer.zero_grad()
    training.backward(STEADY, ahead)
    with host_syncs(training.device, training.optimizer) as syncs:
        training.update(scenario)
    if training.sparse:
        return Moved(syncs.value, None)
    training.optimizer.zero_grad()
    training.backward(STEADY + 1, ahead)
    with counted_traffic() as traffic:
        training.update(scenario)
    parameters = sum(parameter.numel() for parameter in training.parameters)
    return Moved(syncs.value, (traffic.read + traffic.written) / parameters)


def _line(error: Exception) -> str:
    """The error's class and its first line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
