"""``Tensor.to`` and its kin, recorded as they were written.

The Python binding looks up the dtype that the call leaves open: ``x.to("cpu")`` and ``x.to(y)`` reach ATen with the
dtype that the tensor has now, as if the user had asked for it. Under a policy ``x`` and ``y`` may have other dtypes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_POSITIONAL = {Tensor: ("other",), torch.dtype: ("dtype",)}


def conversion(method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """The result of ``Tensor.<method>(*args, **kwargs)``, if the method converts and leaves the dtype open, else None.

    ``args`` start with the tensor. The call is made of an ATen overload that leaves the dtype open too.
    """
    tensor, *rest = args
    if method in ("cpu", "cuda"):
        given = dict(zip(("device", "non_blocking") if method == "cuda" else ("memory_format",), rest, strict=False))
        given = {"device": method, **given, **kwargs}
    elif method == "type_as":
        given = {"other": rest[0]}
    elif method == "to":
        given = _to_arguments(rest, kwargs)
    else:
        return None
    if given.get("dtype") is not None:
        return None
    given = {name: value for name, value in given.items() if value is not None}
    result: Tensor
    if "other" in given:
        result = aten.to.other(tensor, given.pop("other"), **given)
    else:
        device = torch.device(given.pop("device", tensor.device))
        result = aten.to.dtype_layout(tensor, device=device, **given)
    return result


def _to_arguments(rest: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``Tensor.to`` after the tensor, by name; its three signatures differ in the first ones."""
    first = next(
        (names for kind, names in _POSITIONAL.items() if rest and isinstance(rest[0], kind)), ("device", "dtype")
    )
    return {**dict(zip((*first, "non_blocking", "copy"), rest, strict=False)), **kwargs}
