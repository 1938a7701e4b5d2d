"""A real model under Inductor, the default lowering."""

import pytest
from error_rule import excess, relative_errors, worse_parameters
from model_runs import baseline, compiled

pytestmark = [pytest.mark.inductor, pytest.mark.exhaustive]


@pytest.mark.parametrize("name", ["vit"])
def test_inductor_is_no_further_from_float64_than_autocast(name: str) -> None:
    base = baseline(name)
    subject = compiled(base, "inductor")
    assert excess(relative_errors(subject, base.true), relative_errors(base.autocast, base.true)) <= 1
    assert list(worse_parameters(subject, base.autocast, base.true)) == []
    for ours, theirs in zip(subject, base.autocast, strict=True):
        assert ours.gradients.keys() == theirs.gradients.keys()
