"""The semantics of autocast's categories, written down once more from its source, to test the policy files alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from fxamp.policy import Category, Policy
from oracle.dtypes import input_dtypes
from oracle.observe import Observation, dtype_argument

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Call = tuple[OpOverload, Args, Kwargs]


class Refused(Exception):
    """The category refuses the call."""


def expected(policy: Policy, op: OpOverload, args: Args, kwargs: Kwargs) -> Observation:
    """Return what reaches the op by a resolved policy's rule, for a call on FakeTensors."""
    rule = policy.rule_for(op.name())
    category = None if rule is None or op._schema.is_mutable else rule.cast
    try:
        op, args, kwargs = _EDITS[category](policy, op, args, kwargs)
    except Refused as refusal:
        return Observation(refused=refusal)
    return Observation(str(op), input_dtypes(args, kwargs), dtype_argument(op, args, kwargs))


def _eligible(policy: Policy, value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        and value.device.type == policy.device
    )


def _cast_to(dtype: torch.dtype, policy: Policy, op: OpOverload, args: Args, kwargs: Kwargs) -> Call:
    args, kwargs = tree_map(lambda value: value.to(dtype) if _eligible(policy, value) else value, (args, kwargs))
    return op, args, kwargs


def _lower(policy: Policy) -> torch.dtype:
    lower: torch.dtype = getattr(torch, policy.lower_precision_fp)
    return lower


def _lower_precision_fp(policy: Policy, op: OpOverload, args: Args, kwargs: Kwargs) -> Call:
    return _cast_to(_lower(policy), policy, op, args, kwargs)


def _fp32(policy: Policy, op: OpOverload, args: Args, kwargs: Kwargs) -> Call:
    return _cast_to(torch.float32, policy, op, args, kwargs)


def _fp32_set_opt_dtype(policy: Policy, op: OpOverload, args: Args, kwargs: Kwargs) -> Call:
    if dtype_argument(op, args, kwargs) is None and _eligible(policy, args[0]):
        kwargs = {**kwargs, "dtype": torch.float32}
    return op, args, kwargs


def _fp32_append_dtype(policy: Policy, op: OpOverload, args: Args, kwargs: Kwargs) -> Call:
    first = args[0]
    with_dtype = {"Scalar": "ScalarOpt_dtype", "ScalarOpt_dim": "ScalarOpt_dim_dtype"}[op._overloadname]
    defaults = [argument.default_value for argument in op._schema.arguments if not argument.kwarg_only]
    args = (*args, *defaults[len(args) :])
    dtype = torch.float32 if _eligible(policy, first) else first.dtype
    return getattr(op.overloadpacket, with_dtype), args, {**kwargs, "dtype": dtype}


def _promote(policy: Policy, op: OpOverload, args: Args, kwargs: Kwargs) -> Call:
    widest = _lower(policy)
    for tensor in (leaf for leaf in tree_leaves(_required(op, args)) if _eligible(policy, leaf)):
        if torch.float32 in (widest, tensor.dtype):
            widest = torch.float32
        elif tensor.dtype is not widest:
            raise Refused(f"{tensor.dtype} beside {widest}")
    return _cast_to(widest, policy, op, args, kwargs)


def _required(op: OpOverload, args: Args) -> list[Any]:
    """Return the arguments that are tensors by type: optional ones are cast, but have no say in what to."""
    pairs = zip(op._schema.arguments, args, strict=False)
    return [value for argument, value in pairs if str(argument.type) in ("Tensor", "List[Tensor]")]


def _banned(policy: Policy, op: OpOverload, args: Args, kwargs: Kwargs) -> Call:
    rule = policy.rule_for(op.name())
    raise Refused(rule.advice if rule else "")


def _as_it_is(policy: Policy, op: OpOverload, args: Args, kwargs: Kwargs) -> Call:
    return op, args, kwargs


_EDITS: dict[Category | None, Callable[[Policy, OpOverload, Args, Kwargs], Call]] = {
    Category.LOWER_PRECISION_FP: _lower_precision_fp,
    Category.FP32: _fp32,
    Category.FP32_SET_OPT_DTYPE: _fp32_set_opt_dtype,
    Category.FP32_APPEND_DTYPE: _fp32_append_dtype,
    Category.PROMOTE: _promote,
    Category.BANNED: _banned,
    None: _as_it_is,
}
