"""The settings of a policy that accept a fixed set of values."""

from fxamp.devices import DEVICES
from fxamp.dtypes import DTYPES
from fxamp.errors import nearest
from fxamp.policy.model.recipe import unsupported

OUTPUTS = ("captured", "keep")
UNLISTED = ("follow", "fp32", "lower_precision_fp", "promote")

UNLISTED_ID = "unlisted"
"""The id of :attr:`fxamp.Policy.default_rule`, which no rule of a file may have."""

ACCEPTED_VALUES = {
    "device": DEVICES,
    "lower_precision_fp": DTYPES,
    "outputs": OUTPUTS,
    "unlisted": UNLISTED,
}
"""The accepted values of each setting."""


def unknown_value(key: str, value: object, accepted: tuple[str, ...]) -> str:
    """Return the error message for a value that is not in ``accepted``."""
    named = unsupported(value) if isinstance(value, str) else ""
    hint = nearest(value, accepted) if isinstance(value, str) and not named else ""
    what = f": {named}" if named else " is unknown"
    return f"{key} = {value!r}{what}; accepted: {', '.join(map(repr, accepted))}{hint}"
