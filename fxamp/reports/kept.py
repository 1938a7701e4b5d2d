"""Count the bytes that autograd saves for the backward, by running a graph on FakeTensors.

Autograd reports what it saves (``torch.autograd.graph.saved_tensors_hooks``). The count covers distinct storages that
are not inputs, parameters or constants of the graph, which exist anyway. A compiler may save less, because it
recomputes cheap values. A checkpoint saves only its inputs; for a cond the branch that saves more counts.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule, Interpreter, Node, map_arg
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from fxamp.graph import (
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    all_nodes,
    fake_tensors,
    inner_tensors,
    is_wrapper,
    need_gradients,
    nesting_change,
)
from fxamp.graph.higher_order_ops import autograd_function, bodies, gradient_hook
from fxamp.torch_private import calling_saved_tensors_hooks, dropped_sizes, without_autocast
from fxamp.torch_private.parts.fx import tracing, transform_subclass

_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint

_T = TypeVar("_T")


class _Unknown(Exception):
    """Raised if it is unknown what a node saves."""


def kept_bytes(gm: GraphModule, mode: FakeTensorMode) -> int | None:
    """Return the bytes that autograd saves for a captured graph, whose ``meta["val"]`` belong to ``mode``.

    None if it is unknown: no input is known to need a gradient, a node cannot be run on FakeTensors, a size is symbolic
    or the graph has a torch.func transform, which a failure would leave open.
    """
    if any(nesting_change(node.target) for node in all_nodes(gm)):
        return None
    inputs = [_fresh(node.meta.get("val"), mode) for node in gm.graph.find_nodes(op="placeholder")]
    if not need_gradients(inputs):
        return None
    before = torch.is_grad_enabled()
    run = _Run(gm)
    try:
        with dropped_sizes(mode.shape_env), tracing(None), mode, torch.enable_grad(), without_autocast():
            _, saved = saved_tensors(lambda: run.run(*inputs))
    except _Unknown:
        return None
    finally:
        torch.set_grad_enabled(before)
    return total_bytes([*saved, *run.kept], [*inputs, *_constants(gm)])


def saved_tensors(run: Callable[[], _T]) -> tuple[_T, list[Tensor]]:
    """Return the result of ``run``, and the tensors that autograd saves while it runs."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return tensor

    with calling_saved_tensors_hooks(), saved_tensors_hooks(pack, lambda tensor: tensor):
        return run(), saved


def total_bytes(saved: Sequence[Tensor], inputs: Sequence[Any] = ()) -> int | None:
    """Return the bytes of the distinct storages of ``saved`` that are not in ``inputs``; None if a size is symbolic.

    For a DTensor only the part on this rank counts.
    """
    there = {_storage(part) for value in inputs if isinstance(value, Tensor) for part in inner_tensors(value)}
    parts = [part for tensor in saved for part in inner_tensors(tensor)]
    sizes = {_storage(part): part.untyped_storage().nbytes() for part in parts}
    fresh = [size for storage, size in sizes.items() if storage not in there]
    return sum(fresh) if all(isinstance(size, int) for size in fresh) else None


class _Run(Interpreter):
    """Runs a graph; ``kept`` collects what its higher-order ops save, besides what autograd saves in this run."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.kept: list[Tensor] = []

    def run_node(self, n: Node) -> Any:
        if n.op in ("placeholder", "get_attr", "output"):
            return super().run_node(n)
        if n.target in (ENTER_AUTOCAST, EXIT_AUTOCAST):
            return None
        try:
            return self._higher_order(n) if isinstance(n.target, HigherOrderOperator) else super().run_node(n)
        except Exception as error:
            value = n.meta.get("val")
            if isinstance(error, _Unknown) or fake_tensors(value):
                raise _Unknown from error
            return value

    def _higher_order(self, n: Node) -> Any:
        function = autograd_function(n)
        if function is not None:
            return self._function(function.forward.module, self._operands(function.forward.operands))
        if gradient_hook(n) is not None:
            return self.env[n.args[0]]  # type: ignore[index]
        known_bodies = bodies(n)
        if not known_bodies:
            raise _Unknown
        if n.target is _CHECKPOINT:
            return self._checkpoint(known_bodies[0].module, self._operands(known_bodies[0].operands))
        return self._larger([(_Run(body.module), self._operands(body.operands)) for body in known_bodies])

    def _operands(self, operands: Sequence[Any]) -> list[Any]:
        return [map_arg(value, self.env.__getitem__) for value in operands]

    def _checkpoint(self, body: GraphModule, operands: list[Any]) -> Any:
        # The checkpoint itself saves its inputs; autograd saves nothing inside it.
        return checkpoint(_Run(body).run, *operands, use_reentrant=False, preserve_rng_state=False)

    def _larger(self, branches: list[tuple["_Run", list[Any]]]) -> Any:
        results: list[Any] = []
        by_branch: list[list[Tensor]] = []
        for run, operands in branches:
            result, saved = saved_tensors(partial(run.run, *operands))
            results.append(result)
            by_branch.append([*saved, *run.kept])
        self.kept += max(by_branch, key=lambda tensors: total_bytes(list(tensors)) or 0)
        return results[0]

    def _function(self, body: GraphModule, operands: list[Any]) -> Any:
        """A custom autograd.Function saves the values that its forward passes to its backward."""
        with torch.no_grad():
            outputs, saved = Interpreter(body).run(*operands)
        self.kept += [value for value in pytree.tree_leaves(saved) if isinstance(value, Tensor)]
        return pytree.tree_map_only(Tensor, partial(_leaf, needed=need_gradients(operands)), outputs)


def _leaf(value: Tensor, needed: bool) -> Tensor:
    fresh = value.detach()
    return fresh.requires_grad_(needed and (fresh.is_floating_point() or fresh.is_complex()))


def _fresh(value: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(value, Tensor):
        return value
    if is_wrapper(value):
        rebuild: Any = transform_subclass
        return rebuild(value, lambda _, part: _fresh(part, mode)).detach().requires_grad_(value.requires_grad)
    with mode:
        fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return fresh.requires_grad_(value.requires_grad)


def _constants(gm: GraphModule) -> list[Tensor]:
    return [value for module in gm.modules() for value in vars(module).values() if isinstance(value, Tensor)] + [
        *gm.parameters(),
        *gm.buffers(),
    ]


def _storage(tensor: Tensor) -> int:
    storage: int = tensor.untyped_storage()._cdata
    return storage
