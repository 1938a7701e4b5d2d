"""The device types that policies are for, each defined only here. Imports no torch.

A new device needs an entry here and its op table, ``policies/DEVICE.toml``.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """A device type that autocast supports.

    ``float64``: whether it computes in float64. ``bfloat16``: whether it computes in bfloat16 natively; None if that
    depends on the machine, which ``fxamp/backend/policy_choice.py`` then checks.
    """

    float64: bool = True
    bfloat16: bool | None = True


KINDS = {
    "cuda": Device(bfloat16=None),
    "cpu": Device(bfloat16=None),
    "xpu": Device(),
    # Autocast's bfloat16 needs macOS 14 there.
    "mps": Device(float64=False, bfloat16=False),
    "mtia": Device(),
}
"""The devices by type name."""

DEVICES = tuple(KINDS)

NO_FLOAT64 = frozenset(name for name, kind in KINDS.items() if not kind.float64)
"""Devices without float64."""
