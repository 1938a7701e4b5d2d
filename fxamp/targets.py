"""What a policy can be for: the devices and the 16-bit dtypes, by name. Each is defined here alone; imports no torch.

A new device needs its facts here and its built-in policies; a new dtype its name here, its policies, and its arithmetic
in fxamp/kernels/source.py.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """A type of device that autocast knows.

    ``float64``: whether it computes in float64. ``bfloat16``: whether it computes in bfloat16 natively; None if that
    depends on the machine, which ``fxamp/backend/choose.py`` then asks.
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
"""The devices by the name of their type."""

DEVICES = tuple(KINDS)

NO_FLOAT64 = frozenset(name for name, kind in KINDS.items() if not kind.float64)
"""Devices that have no float64."""

DTYPES = ("float16", "bfloat16")
"""What a policy's ``lower_precision_fp`` accepts."""

SCALED_DTYPES = frozenset({"float16"})
"""Those of :data:`DTYPES` whose range is so small that gradients underflow unless the loss is scaled."""
