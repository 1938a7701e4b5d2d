"""Parameters of which a few run always and all run in the gate."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def exhaustive(values: Iterable[Any], always: Collection[Any]) -> list[Any]:
    """``values`` as parameters of a test; those not in ``always`` bear the marker "exhaustive".

    Raises:
        ValueError: ``always`` holds what is not among the values.
    """
    every = list(values)
    if unknown := [value for value in always if value not in every]:
        raise ValueError(f"{unknown} are not among {every}")
    return [value if value in always else pytest.param(value, marks=pytest.mark.exhaustive) for value in every]
