"""Convert an optimizer's saved state to the form that it has without compiled steps, so that it loads anywhere."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def plain_entry(entry: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return one owner's entry, with its step counter where an eager step keeps it.

    Args:
        entry: as the compiled step keeps it.
        group: the owner's settings. Unless they enable "capturable" or "fused", torch keeps ``step`` on the CPU.
    """
    on_device = group.get("capturable") or group.get("fused")
    return {
        name: value.cpu() if name == "step" and isinstance(value, Tensor) and not on_device else value
        for name, value in entry.items()
    }
