"""The -lean policies on real models: the same loss, and gradients at most twice as far from float64 as autocast's.

The models are tiny, so rules for values of some size get a smaller one.
"""

import copy
import statistics
from dataclasses import replace

import pytest
import torch
from error_rule import relative_errors
from model_runs import Baseline, Run, baseline, step

from fxamp.policy import Policy

#: How many times autocast's error the rounding of kept values may make of it.
FACTOR = 2.0


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["lean", "leanest"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit", "resnet"])
def test_gradients_err_at_most_twice_as_much(name: str, kind: str) -> None:
    base = baseline(name)
    plain, lean = (_runs(base, end) for end in ("", f"-{kind}"))
    assert [run.loss for run in lean] == [run.loss for run in plain]
    errors, autocast = relative_errors(lean, base.true), relative_errors(base.autocast, base.true)
    ratio = statistics.fmean(errors) / statistics.fmean(autocast)
    assert ratio <= FACTOR


def _runs(base: Baseline, end: str) -> list[Run]:
    torch._dynamo.reset()
    twin, policy = copy.deepcopy(base.model), Policy.load(f"cpu-bfloat16{end}")
    rules = [replace(rule, elements=">=256") if getattr(rule, "elements", "") else rule for rule in policy.rules]
    twin.compile(backend="fxamp", options={"policy": replace(policy, rules=tuple(rules)), "lowering": "aot_eager"})
    runs = []
    for drawn in base.weights:
        twin.load_state_dict(drawn)
        runs.append(step(twin, base.batch))
    return runs
