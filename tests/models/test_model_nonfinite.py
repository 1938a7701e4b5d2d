"""Option "nonfinite" over the models: it changes no number, raises no alarm, and names the op of each planted fault."""

from itertools import product
from math import isfinite

import pytest
import torch
from corpus import LIBRARIES, WIDE
from model_runs import same, step
from planted import DATA, FAULTS, SUM, misnamed, watched_graphs
from support.checks.exhaustive import exhaustive
from support.oracles.like_autocast import compile_with
from torch import nn
from zoo import MODELS, Batch, build

import fxamp

#: The share of planted faults whose op is named. One of a model's may not be: an infinity planted into the sum of
#: scores and a mask looks like the mask's own, so that the softmax that reads it is named.
NAMED = 0.98

#: Each model with each lowering.
CASES = exhaustive(product(MODELS, ("eager", "aot_eager")), always=[("resnet", "aot_eager")])


def trained(model: nn.Module, batch: Batch, lowering: str, **options: str) -> object:
    """One step of a compiled copy of the model; nothing is found not to be finite."""
    twin = compile_with(model, lowering, policy="cpu-float16", **options)
    run = step(twin, batch)
    assert fxamp.report(twin).nonfinite == ()
    return run


@pytest.mark.exhaustive
@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", WIDE)
def test_models_of_other_libraries_raise_no_false_alarm(name: str, lowering: str) -> None:
    """Some divide zero by zero in float16, or have gradients beyond its range: there is an alarm if that is so."""
    library = name.partition("-")[0]
    pytest.importorskip(LIBRARIES.get(library, library))
    model, batch = build(WIDE[name])
    if not _alarm_is_right(model, batch, lowering, "cpu-float16"):
        assert _alarm_is_right(model, batch, lowering, "cpu-bfloat16")


def _alarm_is_right(model: nn.Module, batch: Batch, lowering: str, policy: str) -> bool:
    """Compare with loss and gradients of a step; return whether they are finite."""
    twin = compile_with(model, lowering, policy=policy, nonfinite="log")
    run = step(twin, batch)
    finite = isfinite(run.loss) and all(bool(torch.isfinite(value).all()) for value in run.gradients.values())
    assert finite == (fxamp.report(twin).nonfinite == ())
    return finite


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_each_planted_fault_is_named(case: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the forward that "eager" runs, and the backward of "aot_eager", with its line, as eager mode finds it."""
    name, lowering = case
    model, batch = build(MODELS[name])
    plain = trained(model, batch, lowering)
    with watched_graphs(monkeypatch, forward=lowering == "eager") as graphs:
        measured = trained(model, batch, lowering, nonfinite="raise")
    assert same(plain, measured)
    for kind in FAULTS:
        reached, wrong = misnamed(graphs, kind)
        assert len(wrong) <= max(1, (1 - NAMED) * reached), (kind, reached, wrong)
        assert reached > 10 or kind in (SUM, *DATA), (kind, reached)
