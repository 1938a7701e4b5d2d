"""Read a loss scaler's settings from a policy."""

from os import PathLike
from typing import Any

from fxamp.dtypes import SCALED_DTYPES
from fxamp.policy import Policy


def scaler_settings(policy: "Policy | str | PathLike[str]", device: str | None) -> dict[str, Any]:
    """Return the constructor arguments of a scaler for ``policy``, a built-in name, a path or a Policy.

    They come from the policy's ``[loss_scale]``. Without that table they are the defaults, and the scaler is enabled
    only for float16. Raises PolicyError if the policy does not exist or is invalid.
    """
    loaded = policy if isinstance(policy, Policy) else Policy.load(policy)
    settings: dict[str, Any] = {"device": loaded.device if device is None else device}
    if loaded.loss_scale is None:
        return settings | {"enabled": loaded.lower_precision_fp in SCALED_DTYPES}
    return settings | loaded.loss_scale.content()
