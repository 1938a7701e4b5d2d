"""The settings that a policy has for a loss scaler."""

from os import PathLike
from typing import Any

from fxamp.policy import Policy
from fxamp.targets import SCALED_DTYPES


def scaler_settings(policy: "Policy | str | PathLike[str]", device: str | None) -> dict[str, Any]:
    """Return the arguments of a scaler for ``policy``, a built-in name, a path or a Policy.

    Those of its ``[loss_scale]``; without that table the defaults, enabled for float16 alone, whose range needs it.
    Raises PolicyError for a policy that does not exist or is mistaken.
    """
    loaded = policy if isinstance(policy, Policy) else Policy.load(policy)
    settings: dict[str, Any] = {"device": loaded.device if device is None else device}
    if loaded.loss_scale is None:
        return settings | {"enabled": loaded.lower_precision_fp in SCALED_DTYPES}
    return settings | loaded.loss_scale.content()
