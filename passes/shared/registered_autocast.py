"""The casts of a custom op's autocast kernel, found by calling the op on FakeTensors.

``torch.library.register_autocast`` registers such a kernel, and so do libraries in C++ (torchvision's ``roi_align``).
A rule states those to float32 and to the 16-bit dtype of the region. It has no word for a cast to a different dtype,
such as bfloat16 under an autocast to float16: :func:`kernel_dtypes` has them all. Casts of the op's results are not
reproduced: those of an op in float32 stay in float32.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxamp.capture.autocast_state import autocast_state
from fxamp.graph import arguments, is_custom, op_name
from fxamp.passes.base import CastContext
from fxamp.policy import CastRule, Category
from fxamp.torch_private import has_autocast_kernel
from fxamp.torch_private.parts.fx import tracing

#: The id of the rule.
REGISTERED_ID = "registered"

_WHY = "The library that the op comes from registers this cast for autocast."


def is_registered(node: Node, context: CastContext) -> bool:
    """Whether ``node`` calls a custom op whose library has registered a kernel for autocast on the policy's device."""
    return is_custom(node.target) and has_autocast_kernel(node.target, context.policy.device)


def registered_rule(node: Node, dtypes: Mapping[str, torch.dtype | None], lower: torch.dtype) -> CastRule | None:
    """Return the casts to float32 and ``lower``, the dtype of the region, as a rule; None without such casts.

    ``dtypes``: those of the kernel, as :func:`kernel_dtypes` returns them. Other inputs follow.
    """
    words = {None: "follow", lower: str(Category.LOWER_PRECISION_FP), torch.float32: str(Category.FP32)}
    casts = {name: words.get(dtype, "follow") for name, dtype in dtypes.items()}
    cast = next((one for one in (Category.LOWER_PRECISION_FP, Category.FP32) if str(one) in casts.values()), None)
    if cast is None:
        return None
    others = {name: one for name, one in casts.items() if one != cast}
    return CastRule(REGISTERED_ID, cast, (op_name(node),), why=_WHY, inputs=tuple(others.items()))


def kernel_dtypes(node: Node, lower: torch.dtype, context: CastContext) -> dict[str, torch.dtype | None]:
    """Return the dtype that the kernel casts eligible inputs to, by argument in order; None if it follows."""
    wide, narrow = (_received(node, dtype, lower, context) for dtype in (torch.float32, lower))
    return {name: dtype if dtype == narrow[name] else None for name, dtype in wide.items() if name in narrow}


class _Reached(Exception):
    """The autocast kernel has called the op."""


class _Watch(TorchDispatchMode):
    """Stops at a call of ``target``; ``call`` has its arguments."""

    def __init__(self, target: OpOverload) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._target = target
        self.call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self._target:
            self.call = args, kwargs or {}
            raise _Reached
        return func(*args, **(kwargs or {}))


def _received(node: Node, dtype: torch.dtype, lower: torch.dtype, context: CastContext) -> dict[str, torch.dtype]:
    """Return the dtype, by argument, that the op receives under autocast for eligible inputs of ``dtype``."""
    target, device = node.target, context.policy.device
    assert isinstance(target, OpOverload)

    def value(source: Any) -> Any:
        own = source.meta.get("val") if isinstance(source, Node) else source
        if not isinstance(own, Tensor) or not context.eligible(own):
            return own
        return torch.empty_strided(own.shape, own.stride(), dtype=dtype, device=device)

    watch = _Watch(target)
    with tracing(None), torch.no_grad(), context.mode, autocast_state(device, True, lower), watch:
        args, kwargs = pytree.tree_map(value, (node.args, node.kwargs))
        with suppress(_Reached):
            target(*args, **kwargs)
    names = (argument.name for argument in target._schema.arguments)
    received = dict(zip(names, watch.call[0], strict=False)) | watch.call[1]
    dtypes: dict[str, torch.dtype] = {}
    for argument, source in arguments(node):
        given = pytree.tree_leaves(received.get(argument.name))
        for own, operand in zip(pytree.tree_leaves(source), given, strict=False):
            if isinstance(own, Node) and context.eligible(own.meta.get("val")) and isinstance(operand, Tensor):
                dtypes.setdefault(argument.name, operand.dtype)
    return dtypes
