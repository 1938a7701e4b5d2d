"""Record ``Tensor.to`` and similar conversions without the dtype that the Python binding adds.

If a call names no dtype, the Python binding fills in the tensor's current one: ``x.to("cpu")`` and ``x.to(y)`` reach
ATen as if the user had asked for that dtype. Under a policy ``x`` and ``y`` may have other dtypes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_POSITIONAL = {Tensor: ("other",), torch.dtype: ("dtype",)}


def conversion(method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the result of ``Tensor.<method>(*args, **kwargs)`` if the method converts and names no dtype, else None.

    ``args`` start with the tensor. The result comes from an ATen overload that names no dtype either.
    """
    tensor, *rest = args
    if method in ("cpu", "cuda"):
        named = dict(zip(("device", "non_blocking") if method == "cuda" else ("memory_format",), rest, strict=False))
        named = {"device": method, **named, **kwargs}
    elif method == "type_as":
        named = {"other": rest[0]}
    elif method == "to":
        named = _to_arguments(rest, kwargs)
    else:
        return None
    if named.get("dtype") is not None:
        return None
    named = {name: value for name, value in named.items() if value is not None}
    result: Tensor
    if "other" in named:
        result = aten.to.other(tensor, named.pop("other"), **named)
    else:
        device = torch.device(named.pop("device", tensor.device))
        if named.get("copy") and device in (tensor.device, torch.device(tensor.device.type)):
            # Inductor returns the input itself for a conversion that changes nothing, even with copy=True.
            result = aten.clone(tensor, memory_format=named.get("memory_format", torch.preserve_format))
        else:
            result = aten.to.dtype_layout(tensor, device=device, **named)
    return result


def _to_arguments(rest: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``Tensor.to`` after the tensor, by name; its three signatures start differently."""
    first = next(
        (names for kind, names in _POSITIONAL.items() if rest and isinstance(rest[0], kind)), ("device", "dtype")
    )
    return {**dict(zip((*first, "non_blocking", "copy"), rest, strict=False)), **kwargs}
