"""Random programs are compiled without logging."""

import pytest


@pytest.fixture(autouse=True)
def _quiet(no_logging: None) -> None:
    """For all tests of this folder."""
