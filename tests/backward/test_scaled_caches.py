"""Compiled code on disk and in memory: a scaled backward is never served for an unscaled one, nor the other way."""

import random
import subprocess
import sys

import cached_training
import pytest

UNSCALED = (False, False, False)
SCALED = (True, False, True)
"""A gradient of 2**-30 survives; one of 2**20 overflows either way, and the scaler sees it."""


@pytest.mark.inductor
def test_with_without_and_with_again_in_one_process_and_the_next() -> None:
    token, scale = random.SystemRandom().random(), 2.0**20  # no run before this one has compiled it
    assert [cached_training.train(each, token) for each in (scale, None, scale)] == [SCALED, UNSCALED, SCALED]
    command = [sys.executable, cached_training.__file__, str(token), "None", str(scale), "None"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *lines, hits = done.stdout.splitlines()
    assert lines == [" ".join(map(str, expected)) for expected in (UNSCALED, SCALED, UNSCALED)]
    # The second process must have met the first one's code, or it shows nothing.
    assert int(hits.removeprefix("hits ")) > 0
