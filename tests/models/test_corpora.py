"""Models of other libraries, as scripts train them: under autocast, with the policy "auto".

The oracle is eager autocast. Torch's own "aot_eager" under autocast is the control: it says what any compiler changes.
"""

import copy
from typing import Any

import pytest
import torch
from corpus import LIBRARIES, SMALL, WIDE
from error_rule import excess, relative_errors, worse_parameters
from model_runs import DRAWS, Run, bfloat16_autocast, draws, in_float64, same, step
from support.checks.exhaustive import exhaustive
from zoo import Batch, build

from fxamp.reports import registry

#: A compiler writes to the buffers of a checkpoint once; eager autocast does so again in the backward.
_CHECKPOINTED = frozenset({"torchvision-densenet-checkpointed"})


@pytest.mark.parametrize("name", exhaustive(WIDE, always=SMALL))
def test_every_bit_is_that_of_eager_autocast(name: str) -> None:
    model, batch = _built(name)
    expected, ours = _step(copy.deepcopy(model), batch), _step(_through_fxamp(model, "eager"), batch)
    if name in _CHECKPOINTED:
        assert not same(ours, expected)
        expected = _step(_compiled(model, "aot_eager"), batch)
    assert same(ours, expected)


@pytest.mark.parametrize("name", exhaustive(("diffusers-dit", *SMALL), always=SMALL[:1]))
def test_aot_eager_is_no_further_from_float64_than_autocast(name: str) -> None:
    model, batch = _built(name)
    exact, through_fxamp = copy.deepcopy(model).double(), _through_fxamp(model, "aot_eager")
    true, autocast, ours = [], [], []
    for weights in draws(model.state_dict()):
        for subject in (exact, through_fxamp, model):
            subject.load_state_dict(weights)
        true.append(step(exact, in_float64(batch)))
        autocast.append(_step(model, batch))
        ours.append(_step(through_fxamp, batch))
    assert len(ours) == DRAWS
    assert all(a.gradients.keys() == b.gradients.keys() for a, b in zip(ours, autocast, strict=True))
    if not all(map(same, ours, autocast)):
        assert excess(relative_errors(ours, true), relative_errors(autocast, true)) <= 1
        assert list(worse_parameters(ours, autocast, true)) == []


def test_the_corpora_are_wide() -> None:
    assert len(WIDE) >= 60


def _built(name: str) -> tuple[torch.nn.Module, Batch]:
    library = name.partition("-")[0]
    pytest.importorskip(LIBRARIES.get(library, library))
    return build(WIDE[name])


def _step(model: torch.nn.Module, batch: Batch) -> Run:
    torch.manual_seed(0)
    return step(model, batch, bfloat16_autocast())


def _through_fxamp(model: torch.nn.Module, lowering: str) -> torch.nn.Module:
    since = registry.count()
    twin = _compiled(model, "fxamp", lowering=lowering)
    twin.register_forward_hook(lambda *_: _assert_compiled(since))
    return twin


def _assert_compiled(since: int) -> None:
    assert sum(record.casts for record in registry.recent(since)) > 0


def _compiled(model: torch.nn.Module, backend: str, **options: Any) -> torch.nn.Module:
    torch._dynamo.reset()
    twin = copy.deepcopy(model)
    twin.compile(backend=backend, options=options or None)
    return twin
