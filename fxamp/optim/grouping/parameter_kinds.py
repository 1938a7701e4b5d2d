"""Kinds of parameters: those that the same pointwise program steps, whatever their shapes.

A parameter belongs to a kind if

1. it has a gradient, and its state consists of dense tensors of its shape and strides, and of 0-dim tensors;
2. its step consists of the same ops as those of the others of its group, and reads no other parameter's tensors;
3. the step performs the same ops on this parameter alone, and on the parameter as a one-dimensional tensor.

So one trace of a flat parameter serves the whole kind. One more program steps all other parameters.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxamp.kernels.launch_plan import is_dense
from fxamp.optim.errors import NotCompilableError
from fxamp.optim.grouping.ops_by_parameter import ops_by_parameter
from fxamp.optim.reading.fingerprint import fingerprint
from fxamp.optim.reading.layout import Layout


@dataclass(frozen=True)
class ParameterKind:
    """``members``: positions of the kind's parameters in the layout, all of one group. The first one is traced.

    If any has elements, the first one does: the shard of a small parameter may be empty.
    """

    members: tuple[int, ...]


@dataclass
class SortedParameters:
    """The kinds of a layout's parameters; ``others``: by reason, the positions of the parameters without a kind."""

    kinds: list[ParameterKind]
    others: dict[str, list[int]] = field(default_factory=dict)

    def exclude(self, positions: Iterable[int], why: str) -> None:
        """Record ``why`` these parameters belong to no kind."""
        self.others.setdefault(why, []).extend(positions)


def sort_parameters(optimizer: torch.optim.Optimizer, layout: Layout) -> SortedParameters:
    """Sort the parameters of a layout, whose state is complete, into kinds.

    Raises:
        NotCompilableError: the step cannot be run on tensors without values.
    """
    ops = ops_by_parameter(optimizer, layout)
    groups, result = layout.group_of(), SortedParameters([])
    members: dict[tuple[int, Hashable, Hashable], list[int]] = {}
    shared = any(not isinstance(owner, Tensor) for owner in layout.state)
    for at, gradient in enumerate(layout.gradients):
        if gradient is None:
            continue
        why = "its state has keys that are not parameters" if shared else _misfit(layout, at)
        if why is None and ops[at] is None:
            why = "the step reads other parameters too"
        if why is None:
            members.setdefault((groups[at], _dtypes(layout, at), ops[at]), []).append(at)
        else:
            result.exclude([at], why)
    for (_, _, own_ops), positions in members.items():
        if _ops_alone(optimizer, layout, positions[0]) == own_ops:
            with_elements_first = sorted(positions, key=lambda at: not layout.parameters[at].numel())
            result.kinds.append(ParameterKind(tuple(with_elements_first)))
        else:
            result.exclude(positions, "the step depends on its shape, or on the other parameters")
    return result


def _misfit(layout: Layout, at: int) -> str | None:
    """Return why a parameter's tensors cannot be read element by element in memory order; None if they can."""
    parameter, gradient = layout.parameters[at], layout.gradients[at]
    if not parameter.dim() or not (parameter.numel() or layout.is_split(at)):
        return "it has no dimension, or no element"
    if not is_dense(parameter):
        return "its elements do not fill their memory"
    if gradient is None or gradient.shape != parameter.shape:
        return "its gradient has another shape"
    for name, value in layout.state.get(parameter, {}).items():
        if not isinstance(value, Tensor) or not value.dim():
            continue
        if value.shape != parameter.shape or not same_order(value, parameter):
            return f"{name!r} of its state has another shape or order of memory"
        if value.device != parameter.device:
            return f"{name!r} of its state is on another device"
    return None


def same_order(one: Tensor, other: Tensor) -> bool:
    """Whether two dense tensors of one shape store their elements in the same order."""
    return one.stride() == other.stride() or (one.is_contiguous() and other.is_contiguous())


def _dtypes(layout: Layout, at: int) -> Hashable:
    """Return the dtypes of a parameter, its gradient and its state, which flattening does not change."""
    parameter, gradient = layout.parameters[at], layout.gradients[at]
    assert gradient is not None
    entry = layout.state.get(parameter, {})
    return parameter.dtype, gradient.dtype, tuple((name, _flat_fingerprint(value)) for name, value in entry.items())


def _flat_fingerprint(value: Any) -> Hashable:
    if not isinstance(value, Tensor):
        return fingerprint(value)
    return (value.dtype, value.dim() == 0, getattr(value, "form", None))


def _ops_alone(optimizer: torch.optim.Optimizer, layout: Layout, at: int) -> Hashable | None:
    """Return the ops on one parameter, flat and alone; None if the step cannot be run so."""
    alone = layout.only((at,))
    flat = [torch.empty(t.numel() if t.dim() else (), dtype=t.dtype, device="meta") for t in alone.whole_tensors()]
    try:
        return ops_by_parameter(optimizer, alone, flat)[0]
    except NotCompilableError:
        return None
