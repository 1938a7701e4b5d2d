"""What tests of the bench share."""

from collections.abc import Iterator

import pytest
from support.checks.cost_counting import Counting


@pytest.fixture(scope="session")
def counting() -> Iterator[Counting]:
    process = Counting()
    yield process
    process.close()
