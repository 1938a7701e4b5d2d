"""An optimizer's saved state as it would be without compiled steps, so that it loads anywhere."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fxamp.optim.layout import SAME, Origin


def plain_entry(entry: Mapping[str, Any], origin: Origin | None, group: Mapping[str, Any]) -> dict[str, Any]:
    """One owner's entry: only what it held before its first step if that was not taken, counters where eager has them.

    Args:
        entry: as the compiled step keeps it.
        origin: what it held before its first step; None if that step was taken.
        group: the owner's settings. Unless they say "capturable" or "fused", torch keeps ``step`` on the CPU.
    """
    if origin is not None:
        entry = {name: entry[name] if value is SAME else value for name, value in origin.items()}
    on_device = group.get("capturable") or group.get("fused")
    return {
        name: value.cpu() if name == "step" and isinstance(value, Tensor) and not on_device else value
        for name, value in entry.items()
    }
