"""Plant faults in graphs that are watched: run them op by op with one value made infinite or NaN; ask who is named.

The graphs are those that a lowering runs: a forward under "eager", a backward of AOTAutograd's under "aot_eager".
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxamp.nonfinite import watching
from fxamp.nonfinite.flow import Flow
from fxamp.nonfinite.origins import Readings
from fxamp.passes.shared.magnitudes import passes_on


@dataclass
class Watched:
    """A graph that was watched, its flow, the inputs of its first run, and the nodes whose ops can be to blame."""

    gm: GraphModule
    flow: Flow
    args: list[Any]
    ops: list[Node]

    def run(self, fault: "Fault | None" = None, mode: "FirstOp | None" = None) -> list[float]:
        """Run the graph op by op on copies of its inputs; return what it measured."""
        args = pytree.tree_map_only(Tensor, lambda value: value.detach().clone(), self.args)
        with torch.no_grad():
            results = _Run(self.gm, fault, mode).run(*args)
        numbers: list[float] = pytree.tree_leaves(results)[-1].tolist()
        return numbers

    def op_of(self, name: str) -> str:
        """The op of the forward to which the node called ``name`` belongs, in a backward; else the node itself."""
        return next((value.forward for value in self.flow.values if value.entry.name == name), "") or name

    def named(self, fault: "Fault | None" = None, mode: "FirstOp | None" = None) -> str | None:
        """The node that is named for a run; None if there is no alarm."""
        readings = Readings.of(self.flow, self.run(fault, mode))
        origin = readings.origin()
        return None if origin is None else self.flow.values[origin].entry.name


def _ops(gm: GraphModule, flow: Flow) -> list[Node]:
    """The nodes of ``gm`` whose ops can make a value that is not finite."""
    names = {value.entry.name for value in flow.values if value.limit and not value.fresh}
    calls = [node for node in gm.graph.nodes if isinstance(node.target, OpOverload) and node.name in names]
    return [node for node in calls if not passes_on(node) and node.meta.get("partitioner_tag") != "is_forward"]


@dataclass(frozen=True)
class Fault:
    """One element of the result of the node called ``node`` becomes ``value``; ``whole``: all of them."""

    node: str
    value: float
    whole: bool = False

    def plant(self, result: Any) -> None:
        """Make the first floating tensor of ``result`` wrong, in place."""
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
                (leaf if self.whole else leaf[(0,) * leaf.dim()]).fill_(self.value)
                return


class FirstOp(TorchDispatchMode):
    """The nodes whose ops return what is not finite although all that they read is, op by op in eager mode."""

    def __init__(self) -> None:
        super().__init__()
        self.node = ""
        self.makers: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = _finite((args, kwargs))
        result = op(*args, **(kwargs or {}))
        if read and not _finite(result):
            self.makers.append(self.node)
        return result


def _finite(values: Any) -> bool:
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    with torch.utils._python_dispatch._disable_current_modes():
        return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


class _Run(Interpreter):
    """Runs a graph node by node, with one fault, and tells ``mode`` which node runs."""

    def __init__(self, gm: GraphModule, fault: Fault | None, mode: FirstOp | None) -> None:
        super().__init__(gm)
        self._fault, self._mode = fault, mode

    def run_node(self, n: Node) -> Any:
        if self._mode is None or n.op != "call_function":
            result = super().run_node(n)
        else:
            self._mode.node = n.name
            with self._mode:
                result = super().run_node(n)
        if self._fault is not None and n.name == self._fault.node:
            self._fault.plant(result)
            if self._mode is not None:
                self._mode.makers.append(n.name)
        return result


@contextmanager
def watched_graphs(monkeypatch: pytest.MonkeyPatch, forward: bool) -> Iterator[list[Watched]]:
    """Collect the graphs that are watched inside, in the order of their first runs; forwards or backwards."""
    made: dict[Flow, tuple[GraphModule, list[Node]]] = {}
    ran: dict[Flow, Watched] = {}
    flow_of, take = watching.flow_of, watching.Watching._take

    def noting(gm: GraphModule, *args: Any) -> Flow:
        flow = flow_of(gm, *args)
        made[flow] = gm, _ops(gm, flow)
        gm.register_forward_pre_hook(lambda _, inputs: inputs_of.__setitem__(gm, _copies(inputs)))
        return flow

    def taking(self: Any, flow: Flow, numbers: Tensor, backward: bool = False) -> None:
        gm, ops = made.get(flow, (None, list[Node]()))  # none of a backward that is no graph
        if gm is not None and backward is not forward and flow not in ran and gm in inputs_of:
            ran[flow] = Watched(gm, flow, list(inputs_of[gm]), ops)
            graphs.append(ran[flow])
        take(self, flow, numbers, backward)

    inputs_of: dict[GraphModule, Sequence[Any]] = {}
    graphs: list[Watched] = []
    with monkeypatch.context() as patch:
        patch.setattr(watching, "flow_of", noting)
        patch.setattr(watching.Watching, "_take", taking)
        yield graphs


def _copies(values: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda value: value.detach().clone(), values)


def misnamed(graphs: Sequence[Watched], fault: Callable[[str], Fault]) -> tuple[int, list[str]]:
    """Plant ``fault`` at each op in turn; return how many reached a result, and for which another op was named."""
    reached, wrong = 0, []
    for graph in graphs:
        for node in graph.ops:
            named = graph.named(fault(node.name))
            if named is None:
                continue
            reached += 1
            if named != node.name and graph.op_of(named) != graph.op_of(node.name):
                wrong.append(f"{node.name} ({node.target}): {named}")
    return reached, wrong
