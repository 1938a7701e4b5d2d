"""One step of a tensor-parallel program, by eager autocast or through fxamp, and what it leaves on this rank."""

from typing import Any

import torch
from parallel_programs import Program
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import fxamp

SCALE = 2.0**8
"""Far from overflow and underflow of the programs' gradients: scaling by it must change no bit."""

Values = dict[str, tuple[Tensor, str] | None]
"""By name, a result or a gradient: this rank's part, and its placements ("" of a plain tensor); None for none."""


def by_autocast(program: Program, mesh: DeviceMesh | None, scaled: bool, dtype: torch.dtype | None = None) -> Values:
    """Eager autocast, the loss times the scale if ``scaled``; without a mesh the program is in one piece.

    ``dtype`` is that of a run without autocast instead.
    """
    net = program.make(mesh)
    inputs = program.inputs(*_place(mesh))
    if dtype is not None:
        net, inputs = net.to(dtype), _to(inputs, dtype)
    with torch.autocast("cpu", _lower(scaled), enabled=dtype is None):
        results = net(*inputs)
    (_loss(results) * (SCALE if scaled else 1.0)).backward()
    return _values(net, inputs, results, divided=SCALE if scaled else 1.0)


def by_fxamp(program: Program, mesh: DeviceMesh, lowering: str, scaled: bool, **options: Any) -> Values:
    """The same through fxamp, as one graph."""
    torch._dynamo.reset()
    net, inputs = program.make(mesh), program.inputs(*_place(mesh))
    chosen = {"policy": f"cpu-{str(_lower(scaled)).removeprefix('torch.')}", "lowering": lowering}
    if scaled:
        chosen["scaler"] = fxamp.GradScaler("cpu", init_scale=SCALE)
    net.compile(backend="fxamp", fullgraph=True, options=chosen, **options)
    results = net(*inputs)
    _loss(results).backward()
    return _values(net, inputs, results)


def _lower(scaled: bool) -> torch.dtype:
    return torch.float16 if scaled else torch.bfloat16


def _place(mesh: DeviceMesh | None) -> tuple[int, int]:
    return (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())


def _to(inputs: Any, dtype: torch.dtype) -> Any:
    def convert(value: Tensor) -> Tensor:
        return value.detach().to(dtype).requires_grad_() if value.is_floating_point() else value

    return pytree.tree_map_only(Tensor, convert, inputs)


def _loss(results: Any) -> Tensor:
    parts = [result.float() for result in pytree.tree_leaves(results)]
    return torch.stack([part.square().sum() for part in parts]).sum()


def _values(net: nn.Module, inputs: Any, results: Any, divided: float = 1.0) -> Values:
    # A compiled graph returns float32, which holds every 16-bit value.
    values: dict[str, Tensor | None] = {f"result {i}": value for i, value in enumerate(pytree.tree_leaves(results))}
    values = {name: value.double() for name, value in values.items() if value is not None}
    gradients = {name: parameter.grad for name, parameter in net.named_parameters()}
    gradients |= {f"input {i}": value.grad for i, value in enumerate(inputs) if value.requires_grad}
    values |= {name: None if gradient is None else gradient / divided for name, gradient in gradients.items()}
    return {name: None if value is None else _part(value) for name, value in values.items()}


def _part(value: Tensor) -> tuple[Tensor, str]:
    if isinstance(value, DTensor):
        return value.to_local().detach().clone(), str(value.placements)
    return value.detach().clone(), ""


def whole(rows: list[Values], name: str, expected: torch.Size) -> Tensor:
    """The global tensor that the ranks' parts make: of a DTensor by its placement, else by the shape it must have."""
    parts = [row[name] for row in rows]
    tensors = [part[0] for part in parts if part is not None]
    assert len(tensors) == len(rows)
    placement = parts[0][1]
    if "Partial" in placement:
        return torch.stack(tensors).sum(0)
    if tensors[0].shape == expected:
        return tensors[0]
    (dim,) = [d for d, (size, all_) in enumerate(zip(tensors[0].shape, expected, strict=True)) if size != all_]
    return torch.cat(tensors, dim)
