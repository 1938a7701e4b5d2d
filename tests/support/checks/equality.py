"""Values that must be the same bit for bit, at any depth of sequences and mappings."""

from typing import Any

from torch.testing import assert_close


def assert_equal(ours: Any, theirs: Any, *, check_dtype: bool = True, equal_nan: bool = False) -> None:
    """Assert equal values, shapes and dtypes of tensors, as many in sequences, and by the same names in mappings."""
    assert_close(ours, theirs, rtol=0, atol=0, check_dtype=check_dtype, equal_nan=equal_nan)
