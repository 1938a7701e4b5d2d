"""Trace an optimizer's own step into a functional ATen graph, whose only writes are final copies to its inputs.

The step's Python code runs once, on fake tensors, on the path that torch's optimizers take under torch.compile. The
floats of the settings are symbols, so a scheduler that changes a learning rate only changes an input of the graph. The
trace records the conditions on them that the step tested (``weight_decay != 0``): the graph is valid while their
results stay the same.

State that the step creates is not an input, so a layout's state must be complete; see ``counters_as_tensors``.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import SymFloat, Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from fxamp.graph import is_mutable
from fxamp.optim.errors import NotCompilableError, explaining_failures
from fxamp.optim.reading.layout import Layout, with_values
from fxamp.optim.tracing.as_parameters import as_parameters
from fxamp.optim.tracing.no_writes import NoOtherWrites
from fxamp.optim.tracing.stand_ins import Counts, run_on_stand_ins
from fxamp.passes.step.fold_unscale import GRADIENT, gradients
from fxamp.passes.step.pack_state import ROLE
from fxamp.torch_dtypes import NARROW
from fxamp.torch_private import make_fx
from fxamp.torch_private.parts.dynamo import ConstantSource

aten = torch.ops.aten
log = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Traced:
    """A step's graph.

    Attributes:
        module: takes the layout's tensors, then the lifted floats; writes to its inputs.
        mode: owns the values in the graph.
        guards: the conditions on the floats that the step tested, as sympy expressions of ``symbols``.
        symbols: the lifted floats' symbols, in order.
        floats: the values of all floats when it was traced; floats that are not lifted are constants in the graph.
        lifted: the indices of the floats that are inputs, in order.
        writes_gradients: whether the step changes gradients, as ``p.grad.add_(p, alpha=weight_decay)`` does.
    """

    module: GraphModule
    mode: FakeTensorMode
    guards: tuple[Any, ...]
    symbols: tuple[Any, ...]
    floats: tuple[float, ...] = ()
    lifted: tuple[int, ...] = ()
    writes_gradients: bool = False

    def inputs(self, floats: Sequence[float]) -> list[float]:
        """Return the floats, out of all ``floats``, that the graph takes as inputs."""
        return [floats[at] for at in self.lifted]

    def serves(self, floats: Sequence[float]) -> bool:
        """Whether the constants are equal, and all recorded conditions on the other floats have the same result."""
        if any(floats[at] != value for at, value in enumerate(self.floats) if at not in self.lifted):
            return False
        if not self.guards:
            return True
        import sympy  # type: ignore[import-untyped]

        values = {symbol: sympy.Float(value) for symbol, value in zip(self.symbols, self.inputs(floats), strict=True)}
        return all(bool(guard.xreplace(values) == sympy.true) for guard in self.guards)


def fake_mode() -> FakeTensorMode:
    """Return a mode in which shapes are constants and floats may be symbols."""
    return FakeTensorMode(shape_env=ShapeEnv())


def fakes_of(tensors: Sequence[Tensor], mode: FakeTensorMode) -> list[Tensor]:
    """Return plain fake tensors, one for each tensor, and the same fake for the same tensor."""
    return [mode.from_tensor(tensor.detach(), static_shapes=True) for tensor in tensors]


def run_without_values(tensors: Sequence[Tensor], run: Callable[[list[Tensor]], Result]) -> Result:
    """Return the result of ``run`` on stand-ins for ``tensors``: meta tensors, which are cheap, or else fakes.

    It has no effect on other tensors, or on the random numbers drawn later.

    Raises:
        NotCompilableError: it fails on fakes too.
    """
    with torch.random.fork_rng({tensor.device for tensor in tensors if tensor.is_cuda}):
        try:
            with torch.no_grad(), explaining_failures(), NoOtherWrites():
                return run([torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors])
        except NotCompilableError as error:
            log.debug("not run on meta tensors: %s", error)
        mode = fake_mode()
        fakes = fakes_of(tensors, mode)
        with mode, torch.no_grad(), explaining_failures(), NoOtherWrites():
            return run(fakes)


class Stepped(NamedTuple):
    """What a step leaves behind: ``gradients`` are those that are not None, ``state`` is by the layout's owners.

    ``counts``: the settings to which it added one.
    """

    parameters: list[Tensor]
    gradients: list[Tensor]
    state: dict[Any, dict[str, Any]]
    counts: Counts


def run_once(
    optimizer: torch.optim.Optimizer,
    layout: Layout,
    tensors: Sequence[Tensor],
    floats: Sequence[Any],
    wide: bool = False,
) -> Stepped:
    """Run the step on stand-ins for ``layout.tensors()``; ``wide``: its counters are float64."""
    remaining = iter(tensors)
    parameters = [next(remaining) for _ in layout.parameters]
    as_parameters(parameters, layout.owners)
    # Copies, so that a step that writes to the gradient does not change the gradient of the user or of the other run.
    gradients = [None if gradient is None else next(remaining).clone() for gradient in layout.gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    settings = with_values(layout.settings, iter(floats), remaining)
    attributes = {name: next(remaining) for name in layout.held_tensors()}
    owners = {id(p): stand_in for p, stand_in in zip(layout.parameters, parameters, strict=True)}
    originals = {id(stand_in): p for p, stand_in in zip(layout.parameters, parameters, strict=True)}
    state = {}
    for owner, entry in layout.state.items():
        values = {name: next(remaining) if isinstance(value, Tensor) else value for name, value in entry.items()}
        if wide and isinstance(owner, Tensor):
            values = {name: _widened(value, owner) for name, value in values.items()}
        if values:
            state[owners.get(id(owner), owner) if isinstance(owner, Tensor) else owner] = values
    after, counts = run_on_stand_ins(optimizer, parameters, settings, layout.sizes, state, attributes, layout.counted)
    if any(parameter.grad is not own for parameter, own in zip(parameters, gradients, strict=True)):
        raise NotCompilableError("its step sets the grad of a parameter, to None or to another tensor")
    named = {originals.get(id(o), o) if isinstance(o, Tensor) else o: entry for o, entry in after.items()}
    return Stepped(parameters, [gradient for gradient in gradients if gradient is not None], named, counts)


def _widened(value: Any, owner: Tensor) -> Any:
    """Return a 0-dim tensor of float32 or int64 of a parameter's state in float64; anything else unchanged.

    An eager optimizer reads its counter on the host, and computes ``1 - beta ** step`` in Python's float64. Computed in
    float32, as tensors of either dtype do with a Python float, it loses four digits in the first steps: 1 - 0.999 is
    1e-3, and 0.999 in float32 is off by 6e-8. Float64 holds integers up to 2**53. A 0-dim float32 parameter's state is
    0-dim and float32 too, but no counter.
    """
    if not isinstance(value, Tensor) or value.dim():
        return value
    float_counters = owner.dim() or owner.dtype is torch.float64
    counter = value.dtype is torch.int64 or (float_counters and value.dtype is torch.float32)
    return value.double() if counter else value


def flat_fakes(tensors: Sequence[Tensor], mode: FakeTensorMode) -> list[Tensor]:
    """Return one-dimensional fakes for tensors with dimensions, plain fakes for 0-dim tensors."""
    with mode:
        return [torch.empty(t.numel() if t.dim() else (), dtype=t.dtype, device=t.device) for t in tensors]


def wide_fakes(tensors: Sequence[Tensor], mode: FakeTensorMode) -> list[Tensor]:
    """Return flat fakes, with float32 instead of 16-bit floats, which are converted as they are read and written."""
    flat = flat_fakes(tensors, mode)
    with mode:
        return [torch.empty_like(fake, dtype=torch.float32) if fake.dtype in NARROW else fake for fake in flat]


def trace_step(
    optimizer: torch.optim.Optimizer,
    layout: Layout,
    lifted: Sequence[int],
    wide: bool,
    decompositions: dict[Any, Any],
    fakes: Callable[[Sequence[Tensor], FakeTensorMode], list[Tensor]] = fakes_of,
) -> Traced:
    """Trace the step of a layout whose state is complete.

    ``lifted``: the settings' floats that become inputs of the graph; others are constants. ``wide``: the step computes
    with its counters in float64, as in Python; not possible on a device without float64. ``decompositions``: as for
    ``make_fx``. ``fakes``: creates the inputs from the layout's tensors.

    Raises:
        NotCompilableError: the step reads values of tensors on the host, or does something that a graph cannot express.
    """
    mode = fake_mode()
    constants = layout.floats()
    floats = [_symbol(mode, at, constants[at]) for at in lifted]
    symbols = tuple(number.node.expr for number in floats)
    inputs = fakes(layout.tensors(), mode)

    def flat(*values: Any) -> tuple[()]:
        settings: list[Any] = list(constants)
        for at, number in zip(lifted, values[len(inputs) :], strict=True):
            settings[at] = number
        _step(optimizer, layout, list(values[: len(inputs)]), settings, wide)
        return ()

    with mode, torch.no_grad(), explaining_failures():
        functional = torch.func.functionalize(flat, remove="mutations")
        gm = make_fx(functional, decompositions | ops_on_lists())(*inputs, *floats)
    _describe(gm, layout, [*inputs, *floats])
    guards = tuple(guard.expr for guard in mode.shape_env.guards)  # type: ignore[union-attr]
    writes_gradients = any(is_mutable(user) for node in gradients(gm) for user in node.users)
    return Traced(gm, mode, guards, symbols, tuple(constants), tuple(lifted), writes_gradients)


@functools.cache
def ops_on_lists() -> dict[Any, Callable[..., Any]]:
    """Return decompositions of ops on lists of tensors: op by op for each tensor, as torch computes them on a CPU.

    So a step that calls them is the same program for each parameter.
    """
    names = {name.removesuffix("_") for name in dir(torch) if name.startswith("_foreach_")}
    packets = [getattr(aten, form) for name in names for form in (name, f"{name}_") if hasattr(aten, form)]
    ops = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    return {op: functools.partial(op._op_dk, torch._C.DispatchKey.CompositeExplicitAutograd) for op in ops}


def _step(
    optimizer: torch.optim.Optimizer, layout: Layout, values: list[Tensor], floats: Sequence[Any], wide: bool
) -> None:
    """Run the step on ``values`` in place, with all writes at the end."""
    own = [value.clone() for value in values]
    after = run_once(optimizer, layout, own, floats, wide)
    for target, value in zip(values, (*after.parameters, *after.gradients), strict=False):
        target.copy_(value)
    for target, value in list(zip(values, own, strict=True))[layout.setting_places()]:
        target.copy_(value)
    slots = iter(values[len(values) - len(layout.state_tensors()) :])
    for owner, entry in layout.state.items():
        new = after.state.get(owner, {})
        for name, before in entry.items():
            if isinstance(before, Tensor):
                slot = next(slots)
                slot.copy_(_fit(new.get(name), slot, name))
            else:
                _require_same(name, before, new.get(name))


def _require_same(name: str, before: Any, after: Any) -> None:
    if after is not before and after != before:
        raise NotCompilableError(f"its step changes {name!r} of the state, which is a {type(before).__name__}")


def _fit(value: Any, like: Tensor, name: str) -> Tensor:
    """Return ``value`` as a tensor of the shape of ``like``."""
    if isinstance(value, (int, float)):
        return torch.full((), value, dtype=like.dtype, device=like.device)
    if not isinstance(value, Tensor) or value.shape != like.shape:
        raise NotCompilableError(f"{name!r} of its state changes its shape or kind from step to step")
    return value.to(device=like.device, dtype=like.dtype)


def _symbol(mode: FakeTensorMode, at: int, value: float) -> SymFloat:
    source = ConstantSource(f"setting{at}")
    environment = mode.shape_env
    assert environment is not None
    symbol = environment.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    number = environment.create_symfloatnode(symbol, hint=value, source=source)
    assert isinstance(number, SymFloat)
    return number


def _describe(gm: GraphModule, layout: Layout, values: Sequence[Any]) -> None:
    """Give the graph's inputs their values and roles, and mark the gradients; remove unused nodes and writes."""
    start, end = len(layout.parameters), len(layout.parameters) + len(layout.active())
    for node in gm.graph.find_nodes(op="placeholder")[start : layout.setting_places().stop]:
        for user in [user for user in node.users if is_mutable(user) and _is_unchanged(user.args[1], node)]:
            gm.graph.erase_node(user)
    gm.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or is_mutable(node))
    roles = [str(name) for _, name in layout.roles()]
    for at, (node, value) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), values, strict=True)):
        node.meta["val"] = value
        node.meta[ROLE] = roles[at] if at < len(roles) else "number"
        if start <= at < end:
            node.meta[GRADIENT] = True
    gm.recompile()


def changes_nothing(gm: GraphModule) -> bool:
    """Whether a step's graph writes to each of its inputs what is there already."""
    return all(_is_unchanged(node.args[1], node.args[0]) for node in gm.graph.nodes if is_mutable(node))


def _is_unchanged(value: Any, node: Any) -> bool:
    copies = {aten.clone.default: 0, aten.alias.default: 0, aten.copy.default: 1}
    while isinstance(value, torch.fx.Node) and value is not node and value.target in copies:
        value = value.args[copies[value.target]]
    return value is node
