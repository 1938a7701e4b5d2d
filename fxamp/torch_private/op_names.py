"""The operators of the installed torch: their names, and whether autocast has a kernel for one."""

import torch
from torch._ops import OpOverload


def operator_names() -> frozenset[str]:
    """Return the full name of each registered operator, ``"aten::mm.default"``, ``"higher_order::cond.default"``.

    Operators of libraries count once these are imported. Breaks loudly.
    """
    import torch._higher_order_ops  # it registers them
    from torch._ops import _higher_order_ops

    names: list[str] = torch._C._dispatch_get_all_op_names()
    names += [f"higher_order::{name}" for name in _higher_order_ops]
    return frozenset(name if "." in name else f"{name}.default" for name in names)


def has_autocast_kernel(op: OpOverload, device: str) -> bool:
    """Return whether a library has registered for ``op`` what autocast does on ``device``. Breaks loudly."""
    key = f"Autocast{torch._C._dispatch_key_for_device(device)}"
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)  # type: ignore[no-untyped-call]
