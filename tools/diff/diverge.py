"""Find the first op whose results differ by more than rounding under two policies, by running both graphs.

Two roundings of the same number x, with unit roundoffs u and v, differ by at most (u + v)|x|, and |x| is at most
|a|/(1 - u) for its rounding a. Below the normal numbers each is off by at most half of the smallest subnormal number.
Two results outside this bound cannot be roundings of one number to the two dtypes.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from fxamp.backend.rewrite import rewrite
from fxamp.errors import FxampError
from fxamp.graph_text.model import Entry
from fxamp.graph_text.totals import is_op
from fxamp.policy import Policy
from fxamp.reports.list_graph import list_graph
from fxamp.tools.common.silence import in_one_line
from fxamp.tools.inputs.measurement import Batch, Copy
from fxamp.tools.inputs.model_file import Program


@dataclass(frozen=True)
class Divergence:
    """An op under both policies; ``difference``: the 2-norm of the results' difference, relative to the old result."""

    old: Entry
    new: Entry
    difference: float

    def content(self) -> dict[str, Any]:
        """Return the divergence as plain data."""
        return {
            "node": self.new.name,
            "source": str(self.new.source or ""),
            "module": self.new.module,
            "op": self.new.target,
            "dtype": {"old": self.old.dtype, "new": self.new.dtype},
            "difference": plain(self.difference),
        }


def plain(error: float | None) -> float | str | None:
    """Return a number as plain data: "inf" if it is not finite."""
    return error if error is None or math.isfinite(error) else "inf"


def copied(program: Program, device: str, dtype: torch.dtype | None = None) -> Copy:
    """Return a copy of the program on ``device``, with floating-point tensors in ``dtype`` if it is given."""
    return Copy.of(program.model, [Batch(program.args, program.kwargs)], device, dtype)


def first_divergence(program: Program, old: Policy, new: Policy) -> Divergence | str | None:
    """Return the first op, in graph order, whose results cannot be roundings of the same numbers; None if none differs.

    A string says why it is unknown: the program is more than one graph, or the policies are for different devices.
    """
    if old.device != new.device:
        return "unknown: the policies are for different devices"
    try:
        with in_one_line("the program cannot be run node by node"):
            before, after = (_Recorder(program, policy) for policy in (old, new))
            values = dict(before.values())
            for name, other in after.values():
                one = values.get(name)
                if one is not None and one.shape == other.shape and _apart(one, other):
                    return Divergence(before.entries[name], after.entries[name], _difference(one, other))
    except FxampError as error:
        return f"unknown: {str(error).splitlines()[0]}"
    return None


class _Recorder:
    """A program rewritten by a policy, run node by node."""

    def __init__(self, program: Program, policy: Policy) -> None:
        here = copied(program, policy.device)
        (batch,) = here.batches
        names = tuple(batch.kwargs)
        self._inputs = [*batch.args, *batch.kwargs.values()]
        self._module = rewrite(_positional(here.model, names) if names else here.model, self._inputs, policy=policy)
        self.entries = {entry.name: entry for entry in list_graph(self._module).entries if is_op(entry)}

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the floating-point results of the program's ops, by node, in order."""
        results: list[tuple[str, Tensor]] = []

        def keep(name: str, value: object) -> None:
            if name in self.entries and isinstance(value, Tensor) and value.is_floating_point():
                results.append((name, value.detach().clone()))

        torch.manual_seed(0)
        with torch.no_grad():
            _Watched(self._module, keep).run(*_flat(self._module, self._inputs), enable_io_processing=False)
        return iter(results)


class _Watched(Interpreter):
    """An interpreter that passes every value to a callback when it is computed."""

    def __init__(self, module: GraphModule, show: Callable[[str, object], None]) -> None:
        super().__init__(module)
        self._show = show

    def run_node(self, node: Node) -> Any:
        value = super().run_node(node)
        self._show(node.name, value)
        return value


def _positional(model: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """Return the model as a function of positional arguments; the last ones are those called ``names``."""

    def call(*args: Any) -> Any:
        split = len(args) - len(names)
        return model(*args[:split], **dict(zip(names, args[split:], strict=True)))

    return call


def _flat(module: GraphModule, inputs: list[Any]) -> list[Any]:
    """Return the values of the placeholders: the inputs, and the parameters that the graph reads."""
    flatten = getattr(module, "_dynamo_bytecode_flatten", None)
    return list(flatten(*inputs) if flatten is not None else module.graph.process_inputs(*inputs))


def _apart(one: Tensor, other: Tensor) -> bool:
    """Whether two results cannot be roundings of the same numbers to their dtypes."""
    first, second = torch.finfo(one.dtype), torch.finfo(other.dtype)
    coarse, fine = sorted((first.eps / 2, second.eps / 2), reverse=True)
    subnormal = (first.smallest_normal * first.eps + second.smallest_normal * second.eps) / 2
    one, other = one.double(), other.double()
    bound = (coarse + fine) / (1 - coarse) * torch.maximum(one.abs(), other.abs()) + subnormal
    rounded = ((one - other).abs() <= bound) & one.isfinite() & other.isfinite()
    return not bool((rounded | (one == other) | (one.isnan() & other.isnan())).all())


def _difference(one: Tensor, other: Tensor) -> float:
    off, whole = float((one.double() - other.double()).norm()), float(one.double().norm())
    return off / whole if whole else off
