"""The names of all operators of the installed torch."""


def operator_names() -> frozenset[str]:
    """Return the full name of each registered operator, ``"aten::mm.default"``, ``"higher_order::cond.default"``.

    Operators of libraries count once these are imported. Breaks loudly.
    """
    import torch._higher_order_ops
    from torch._ops import _higher_order_ops

    names: list[str] = torch._C._dispatch_get_all_op_names()
    names += [f"higher_order::{name}" for name in _higher_order_ops]
    return frozenset(name if "." in name else f"{name}.default" for name in names)
