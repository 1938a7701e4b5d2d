"""Compiled code on disk and in memory: a scaled backward is never served for an unscaled one, nor the other way."""

import random

import cached_training
import pytest
from support.machines.forked import printed_by
from support.machines.lacks import needs_compiler
from torch._dynamo.utils import counters

UNSCALED = (False, False, False)
SCALED = (True, False, True)
SCALE = 2.0**20
"""A gradient of 2**-30 survives; one of 2**20 overflows either way, and the scaler sees it."""


@pytest.fixture
def token() -> float:
    """A constant that no run before this one has compiled."""
    return random.SystemRandom().random()


@pytest.mark.exhaustive
@needs_compiler
def test_with_without_and_with_again(token: float) -> None:
    assert [cached_training.train(scale, token) for scale in (SCALE, None)] == [SCALED, UNSCALED]
    before = counters["inductor"]["fxgraph_cache_hit"]
    assert cached_training.train(SCALE, token) == SCALED
    # The third run must have met the first one's code, or it shows nothing.
    assert counters["inductor"]["fxgraph_cache_hit"] > before


@pytest.mark.exhaustive
@needs_compiler
def test_with_and_without_in_the_next_process(token: float) -> None:
    assert [cached_training.train(scale, token) for scale in (SCALE, None)] == [SCALED, UNSCALED]
    *lines, hits = printed_by(cached_training.__file__, str(token), "None", str(SCALE), "None")
    assert lines == [" ".join(map(str, expected)) for expected in (UNSCALED, SCALED, UNSCALED)]
    # The second process must have met the first one's code, or it shows nothing.
    assert int(hits.removeprefix("hits ")) > 0
