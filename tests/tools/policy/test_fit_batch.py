"""The largest batch that fits is found by few counts."""

import pytest

from fxamp.tools.policy.fit.batch import MOST, largest


@pytest.mark.parametrize("limit", [5.0, 10.0, 11.0, 99.0, 1234.5, 1e6])
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("power", [1.0, 1.2])
def test_the_largest_batch_is_the_last_that_fits(limit: float, batch: int, power: float) -> None:
    def memory(size: int) -> float:
        return 7.0 + 3.0 * size**power

    counted = largest(memory, batch, limit)
    fits = max((size for size in counted if counted[size] <= limit), default=0)
    assert counted[fits + 1] > limit and (fits == 0 or memory(fits) <= limit < memory(fits + 1))
    assert all(bytes_ == memory(size) for size, bytes_ in counted.items()) and len(counted) <= 12


@pytest.mark.parametrize("batch", [1, 3, 40])
def test_a_batch_fits_that_is_followed_by_one_that_does_not_where_memory_shrinks_in_between(batch: int) -> None:
    def memory(size: int) -> float:
        return size if size < 64 else 0.5 * size

    bytes_of = largest(memory, batch, 50.0)
    fits = max(size for size in bytes_of if bytes_of[size] <= 50.0)
    assert bytes_of[fits + 1] > 50.0


@pytest.mark.parametrize("slope", [0.0, -1.0, 1e-9])
def test_batches_that_take_no_memory_end(slope: float) -> None:
    bytes_of = largest(lambda size: 7.0 + slope * size, 4, 10.0)
    assert max(bytes_of) == MOST and len(bytes_of) <= 6
