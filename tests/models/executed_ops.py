"""What really executes: every compute op with the floating-point dtypes that it takes and gives, in order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from fxamp.tools.common.running_ops import RunningOps

#: Ops that only move or convert values; what they convert to shows in the ops that use it.
_COPIES = frozenset({"_to_copy", "clone", "copy_", "lift_fresh_copy", "_unsafe_view"})


@dataclass(frozen=True)
class Op:
    """One executed op: its name, and the dtypes of its floating-point tensors, inputs then outputs."""

    name: str
    inputs: tuple[torch.dtype, ...]
    outputs: tuple[torch.dtype, ...]

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Inputs' and outputs' together."""
        return (*self.inputs, *self.outputs)

    def __str__(self) -> str:
        return f"{self.name}({_spelled(self.inputs)}) -> {_spelled(self.outputs)}"


class ExecutedOps(RunningOps):
    """Records the compute ops that run inside, compiled graphs included: ``forward``, and ``backward`` apart."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: list[Op] = []
        self.backward: list[Op] = []

    def ran(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not op.is_view and op.overloadpacket.__name__ not in _COPIES:
            self._record(Op(op.name().removeprefix("aten::"), _dtypes((args, kwargs)), _dtypes(result)))

    def _record(self, op: Op) -> None:
        if op.dtypes:
            in_backward = torch._C._current_graph_task_id() != -1
            (self.backward if in_backward else self.forward).append(op)


def _dtypes(value: Any) -> tuple[torch.dtype, ...]:
    leaves = pytree.tree_leaves(value)
    return tuple(leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())


def _spelled(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
