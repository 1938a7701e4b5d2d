"""Option "nonfinite" over the models: it changes no number, raises no alarm, and names the op of each planted fault."""

import copy
from math import inf, nan

import pytest
import torch
from model_runs import same, step
from planted import Fault, FirstOp, misnamed, watched_graphs
from support.checks.exhaustive import exhaustive
from torch import nn
from zoo import MODELS, Batch, build

import fxamp

#: The share of planted faults whose op is named. One of a model's may not be: an infinity planted into the sum of
#: scores and a mask looks like the mask's own, so that the softmax that reads it is named.
NAMED = 0.98

FAULTS = {"one infinity": (inf, False), "one NaN": (nan, False), "NaNs": (nan, True)}

CASES = exhaustive(MODELS, ("bert", "resnet"))


def trained(model: nn.Module, batch: Batch, lowering: str, **options: str) -> object:
    """One step of a compiled copy of the model; nothing is found not to be finite."""
    torch._dynamo.reset()
    twin = copy.deepcopy(model)
    twin.compile(backend="fxamp", options={"policy": "cpu-float16", "lowering": lowering, **options})
    run = step(twin, batch)
    assert fxamp.report(twin).nonfinite == ()
    return run


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_each_planted_fault_is_named(name: str, lowering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = build(MODELS[name])
    plain = trained(model, batch, lowering)
    with watched_graphs(monkeypatch, forward=lowering == "eager") as graphs:
        measured = trained(model, batch, lowering, nonfinite="raise")
    assert same(plain, measured)
    for value, whole in FAULTS.values():
        reached, wrong = misnamed(graphs, lambda node, value=value, whole=whole: Fault(node, value, whole))
        assert reached > 10 and len(wrong) <= max(1, (1 - NAMED) * reached), wrong


def test_eager_mode_op_by_op_finds_the_same_op_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = build(MODELS["bert"])
    with watched_graphs(monkeypatch, forward=True) as graphs:
        trained(model, batch, "eager", nonfinite="raise")
    (graph,) = graphs
    clean = FirstOp()
    assert graph.named(mode=clean) is None
    compared = 0
    for node in graph.ops:
        if node.name in clean.makers:
            continue
        mode = FirstOp()
        named = graph.named(Fault(node.name, nan), mode)
        if named is not None:
            assert named == next(maker for maker in mode.makers if maker not in clean.makers)
            compared += 1
    assert compared > 15
