"""An optimizer's saved state as it would be without compiled steps, so that it loads anywhere."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def plain_entry(entry: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """One owner's entry, with counters where an eager step has them.

    Args:
        entry: as the compiled step keeps it.
        group: the owner's settings. Unless they say "capturable" or "fused", torch keeps ``step`` on the CPU.
    """
    on_device = group.get("capturable") or group.get("fused")
    return {
        name: value.cpu() if name == "step" and isinstance(value, Tensor) and not on_device else value
        for name, value in entry.items()
    }
