"""Fixtures for the kernels' tests."""

from collections.abc import Iterator

import pytest

from fxamp.kernels import Implementation, forced


@pytest.fixture(
    params=[Implementation.INTERPRETER, Implementation.REFERENCE, Implementation.HOST], ids=lambda chosen: chosen.value
)
def implementation(request: pytest.FixtureRequest) -> Iterator[Implementation]:
    """Each implementation that can run on a CPU, in turn."""
    if request.param is Implementation.INTERPRETER:
        pytest.importorskip("triton")
    with forced(request.param):
        yield request.param
