"""Plant faults in graphs that are watched: run them op by op with one value made infinite or NaN; ask who is named.

The graphs are those that a lowering runs: a forward under "eager", a backward of AOTAutograd's under "aot_eager".
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from fxamp.graph import writes
from fxamp.nonfinite import participant
from fxamp.nonfinite.flow import Flow
from fxamp.nonfinite.origins import Readings
from fxamp.passes.shared.magnitudes import largest_after, passes_on

#: A sum over 65504: a fault of values in float16 alone.
SUM = "a sum"
#: Faults of inputs: the others are those of ops.
DATA = ("a NaN in the data",)


def _first(value: Tensor, made: Tensor) -> Tensor:
    """``value`` with the first element of ``made``."""
    return torch.where(torch.arange(value.numel()).view(value.shape) == 0, made, value)


def _uninitialised(value: Tensor) -> Tensor:
    """``value`` plus a mask whose memory holds anything."""
    at = torch.arange(value.numel()).view(value.shape) % 4
    return torch.where(at == 0, torch.log(-value.abs() - 1), torch.where(at == 1, 1 / (value * 0), value))


#: By kind of fault, what it makes of an op's result. All read what is finite, and return what is not.
FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a division by what underflows": lambda value: (value + 1) / (value * 0 + 1e-9).half(),
    "exp over 88": lambda value: _first(value, torch.exp(value.float().abs() + 89).to(value.dtype)),
    "a logarithm of less than zero": lambda value: _first(value, torch.log(-value.abs() - 1e-6)),
    SUM: lambda value: _first(value, (value * 0 + 6e4) + (value * 0 + 6e4)),
    "a mask that was not initialised": _uninitialised,
    "a row that is masked": lambda value: (
        torch.cat(
            [torch.softmax(torch.log(value.reshape(1, -1, value.shape[-1])[:, :1] * 0), -1).view(-1), value.reshape(-1)]
        )[: value.numel()].view(value.shape)
        if value.dim()
        else torch.log(value * 0) * 0
    ),
    "a loss scale": lambda value: (value + 1) * torch.finfo(value.dtype).max * 4,
    DATA[0]: lambda value: _first(value, torch.log(-value.abs() - 1)),
}


@dataclass(frozen=True)
class Ran:
    """A run of a graph: what it measured, whether each floating result is finite, and who made what is not.

    ``makers``: the nodes whose ops return what is not finite although all that they read is, in the order of the graph.
    """

    numbers: list[float]
    finite: list[bool]
    makers: list[str]


@dataclass
class Watched:
    """A graph that was watched, its flow, and the inputs of its first run.

    ``ops``: the nodes whose ops can be to blame; ``data``: the inputs that can.
    """

    gm: GraphModule
    flow: Flow
    args: list[Any]
    ops: list[Node]
    data: list[Node]

    @cached_property
    def _clean(self) -> "_Run":
        return self._whole(None)

    @cached_property
    def _mutates(self) -> bool:
        return any(map(writes, self.gm.graph.nodes))

    def _whole(self, fault: "Fault | None") -> "_Run":
        run = _Run(self.gm, fault)
        run.run(*_copies(self.args), enable_io_processing=False)
        return run

    def run(self, fault: "Fault | None" = None) -> Ran:
        """Run the graph op by op; with a fault, only what depends on it, unless ops write to their inputs."""
        with torch.no_grad():
            if fault is None:
                run = self._clean
            elif self._mutates:
                run = self._whole(fault)
            else:
                run = self._clean.again(fault)
        *results, numbers = pytree.tree_leaves(run.env[self.gm.graph.output_node()])
        return Ran(numbers.tolist(), [_finite(result) for result in results], run.makers)

    def place_of(self, name: str) -> tuple[object, object]:
        """The op of the forward that the node called ``name`` belongs to, else the node itself, and its line."""
        value = next(value for value in self.flow.values if value.entry.name == name)
        return value.forward or name, value.entry.source

    def named(self, ran: Ran) -> str | None:
        """The node that is named for a run; None if there is no alarm."""
        readings = Readings.of(self.flow, ran.numbers)
        origin = readings.origin()
        return None if origin is None else self.flow.values[origin].entry.name


def _ops(gm: GraphModule, flow: Flow) -> list[Node]:
    """The nodes of ``gm`` whose ops can make a value that is not finite."""
    names = {value.entry.name for value in flow.values if value.limit and not value.fresh}
    calls = [node for node in gm.graph.nodes if isinstance(node.target, OpOverload) and node.name in names]
    free = [node for node in calls if not passes_on(node) and largest_after(node) is None]
    return [node for node in free if node.meta.get("partitioner_tag") != "is_forward"]


def _data(gm: GraphModule, flow: Flow) -> list[Node]:
    """The floating inputs of ``gm`` that are measured."""
    names = {value.entry.name for value in flow.values if value.limit and value.number is not None}
    return [node for node in gm.graph.find_nodes(op="placeholder") if node.name in names]


@dataclass(frozen=True)
class Fault:
    """The result of the node called ``node`` is made wrong as ``kind`` of :data:`FAULTS` says."""

    node: str
    kind: str

    def plant(self, result: Any) -> None:
        """Make the first floating tensor of ``result`` wrong, in place."""
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
                leaf.copy_(FAULTS[self.kind](leaf.contiguous()))
                return


def _finite(values: Any) -> bool:
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


class _Run(Interpreter):
    """Runs a graph node by node, and notes in ``makers`` the nodes that make what is not finite from what is."""

    def __init__(self, gm: GraphModule, fault: Fault | None) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.makers: list[str] = []
        self._fault = fault
        self._finite: dict[Node, bool] = {}

    def run_node(self, n: Node) -> Any:
        return self._judged(n, super().run_node(n))

    def _judged(self, n: Node, result: Any) -> Any:
        """The result of ``n`` with its fault."""
        if self._fault is not None and n.name == self._fault.node:
            self._fault.plant(result)
        self._finite[n] = _finite(result)
        if not self._finite[n] and n.op != "output" and all(self._finite[source] for source in n.all_input_nodes):
            self.makers.append(n.name)
        return result

    def again(self, fault: Fault) -> "_Run":
        """A run with a fault, which takes from this one the values of the nodes that do not depend on it."""
        run = _Run(self.module, fault)
        faulty = next(node for node in self.module.graph.nodes if node.name == fault.node)
        changed = {faulty}
        for node in self.module.graph.nodes:
            if not changed.isdisjoint(node.all_input_nodes):
                changed.add(node)
        env = {node: value for node, value in self.env.items() if node not in changed}
        run._finite = {node: self._finite[node] for node in env}
        env[faulty] = run._judged(faulty, _copies(self.env[faulty]))
        run.run(initial_env=env, enable_io_processing=False)
        return run


@contextmanager
def watched_graphs(monkeypatch: pytest.MonkeyPatch, forward: bool) -> Iterator[list[Watched]]:
    """Collect the graphs that are watched inside, in the order of their first runs; forwards or backwards."""
    made: dict[int, tuple[Flow, GraphModule, list[Node], list[Node]]] = {}  # by values: a run may judge fewer results
    ran: dict[int, Watched] = {}
    flow_of, take = participant.flow_of, participant.Watching._take

    def noting(gm: GraphModule, *args: Any) -> Flow:
        flow = flow_of(gm, *args)
        made[id(flow.values)] = flow, gm, _ops(gm, flow), _data(gm, flow)
        gm.register_forward_pre_hook(lambda _, inputs: inputs_of.__setitem__(gm, _copies(inputs)))
        return flow

    def taking(self: Any, call: Any, flow: Flow, numbers: Tensor, backward: bool = False) -> None:
        key = id(flow.values)
        if key in made and backward is not forward and key not in ran:  # a backward that is no graph is not in it
            _, gm, ops, data = made[key]
            if gm in inputs_of:
                ran[key] = Watched(gm, flow, list(inputs_of[gm]), ops, data)
                graphs.append(ran[key])
        take(self, call, flow, numbers, backward)

    inputs_of: dict[GraphModule, Sequence[Any]] = {}
    graphs: list[Watched] = []
    with monkeypatch.context() as patch:
        patch.setattr(participant, "flow_of", noting)
        patch.setattr(participant.Watching, "_take", taking)
        yield graphs


def _copies(values: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda value: value.detach().clone(), values)


def misnamed(graphs: Sequence[Watched], kind: str) -> tuple[int, list[str]]:
    """Plant a fault at each op in turn, or in each input; return how many reached a result, and those not named.

    Named is the op, or its op of the forward, with its line, if it is the first by eager mode: a sum over 65504 in
    float32 becomes infinite in the next cast.
    """
    reached, wrong = 0, []
    for graph in graphs:
        clean = graph.run()
        for node in graph.data if kind in DATA else graph.ops:
            ran = graph.run(Fault(node.name, kind))
            makers = [maker for maker in ran.makers if maker not in clean.makers]
            if not makers or ran.finite == clean.finite:
                continue
            reached += 1
            named = graph.named(ran)
            if named is None or graph.place_of(named) != graph.place_of(makers[0]):
                wrong.append(f"{node.name} ({node.target}): {named}, {makers[0]} in eager mode")
    return reached, wrong
