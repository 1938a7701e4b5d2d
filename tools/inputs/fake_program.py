"""A program whose tensors are all FakeTensors on one device, which need not be there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fxamp.graph import tensor_stores
from fxamp.tools.common.restoration import modules_in
from fxamp.tools.inputs.model_file import Program


@contextmanager
def fake_program(program: Program, mode: FakeTensorMode, device: str, last_use: bool = False) -> Iterator[Program]:
    """Yield the program with each tensor replaced by one of ``mode`` on ``device``; on exit, its modules have theirs.

    ``last_use``: on exit the modules have tensors on "meta", which take no memory: torch holds a compiled module as
    long as the process lives.
    """
    fakes: dict[int, Any] = {}

    def fake(value: Any) -> Any:
        if id(value) not in fakes:
            fakes[id(value)] = _on(device, value, mode)
        return fakes[id(value)]

    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for state in [store for module in set(modules_in(program.model)) for store in tensor_stores(module)]:
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        before.append((state, tensors))
        state.update({name: fake(value) for name, value in tensors.items()})
    try:
        yield Program(program.model, *pytree.tree_map(fake, (program.args, dict(program.kwargs))))
    finally:
        own = {
            id(value): _empty(value, "meta") if last_use else value for _, values in before for value in values.values()
        }
        for state, values in before:
            state.update({name: own[id(value)] for name, value in values.items()})


def _on(device: str, value: Any, mode: FakeTensorMode) -> Any:
    """Return a tensor as a FakeTensor on ``device``; anything else unchanged."""
    if not isinstance(value, Tensor):
        return value
    if value.device.type == device:
        return mode.from_tensor(value)
    with mode:
        return _empty(value, device)


def _empty(value: Tensor, device: str) -> Tensor:
    fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(fresh, value.requires_grad)
    return fresh.requires_grad_(value.requires_grad)
