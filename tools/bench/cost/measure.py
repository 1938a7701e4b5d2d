"""Count one way of training; only for a process whose torch was prepared for it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fxamp.tools.bench.cost.by_hand import step_kernels
from fxamp.tools.bench.cost.compiler import Counted, counting
from fxamp.tools.bench.cost.count import Count
from fxamp.tools.bench.cost.eager import EagerOps
from fxamp.tools.bench.cost.program import as_unpadded_text, fake_workload
from fxamp.tools.bench.cost.simulated_gpu import compiling_for_gpu
from fxamp.tools.bench.cost.workload import Way, Workload
from fxamp.tools.common.silence import quiet


def measure(workload: Workload, way: Way, counted: Counted | None = None) -> Count:
    """Compile the model one way, for FakeTensors, and count what Inductor makes of it, forward and backward."""
    counted = counted or Counted()
    torch._dynamo.reset()
    mode = FakeTensorMode()
    scaled = is_scaled(workload, way)
    with compiling_for_gpu(), quiet(), _unrecorded(), fake_workload(workload, mode) as called:
        scaler = _scaler(way) if scaled else None
        compiled = _compiled(called.model, way, scaler)
        with mode, as_unpadded_text(), counting(counted), EagerOps(counted.count.kernels.append) as eager:
            with _autocast(workload, way):
                result = compiled(*called.args, **called.kwargs)
            eager.stage = "backward"
            losses = [loss if scaler is None else scaler.scale(loss) for loss in _losses(result)]
            torch.autograd.backward(losses, [torch.empty_like(loss) for loss in losses])
    counted.count.kernels += step_kernels(workload, way, scaled, called.parameters)
    return counted.count


def _losses(result: Any) -> list[Tensor]:
    """What the program would run a backward from: its loss, if one is found among its results; else all results.

    A loss is what an attribute ``loss`` holds, or the only result that is a scalar.
    """
    loss = getattr(result, "loss", None)
    if isinstance(loss, Tensor) and loss.requires_grad:
        return [loss]
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    scalars = [tensor for tensor in tensors if tensor.dim() == 0]
    return scalars if len(scalars) == 1 else tensors


@contextlib.contextmanager
def _unrecorded() -> Iterator[None]:
    """Without the scaler's tables of flags, which are made on the host; their kernels are counted by hand."""
    from fxamp.scaler.graphs.graph_flags import GraphFlags

    with patch.object(GraphFlags, "record", lambda *_: None):
        yield


def is_scaled(workload: Workload, way: Way) -> bool:
    """Whether this way of training scales the loss: with ``--scaler``, and wherever it computes in float16."""
    if workload.scaler or way.policy in ("", "auto"):
        return workload.scaler or workload.dtype == "float16"
    from fxamp.policy import Policy

    return Policy.load(way.policy).lower_precision_fp == "float16"


def _scaler(way: Way) -> torch.amp.GradScaler:
    if not way.policy:
        return torch.amp.GradScaler("cuda")
    import fxamp

    return fxamp.GradScaler("cuda")


def _compiled(model: Callable[..., Any], way: Way, scaler: torch.amp.GradScaler | None) -> Callable[..., Any]:
    if not way.policy:
        return torch.compile(model, dynamic=False)
    options: dict[str, Any] = {"policy": way.policy}
    if scaler is not None:
        options["scaler"] = scaler
    return torch.compile(model, backend="fxamp", options=options, dynamic=False)


def _autocast(workload: Workload, way: Way) -> contextlib.AbstractContextManager[Any]:
    if way.policy not in ("", "auto") or workload.dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast("cuda", getattr(torch, workload.dtype))
