"""The model and its inputs as FakeTensors on the GPU."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fxamp.tools.bench.cost.workload import Workload
from fxamp.tools.bench.models import MODELS
from fxamp.tools.common.restoration import modules_in, tensor_stores
from fxamp.tools.inputs.kinds import program_syntax
from fxamp.tools.inputs.model_file import Program, program


@dataclass(frozen=True)
class Called:
    """A model, what it is called with, and its parameters."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    parameters: tuple[Tensor, ...]


def build(workload: Workload, mode: FakeTensorMode) -> Called:
    """Make the workload's program, with tensors of ``mode`` on "cuda" for all of its tensors.

    Raises ListingError if a file of the user's defines no model and inputs.
    """
    program = _of_table(workload) if workload.model in MODELS else _of_file(workload.model)
    fakes: dict[int, Any] = {}

    def fake(value: Any) -> Any:
        if id(value) not in fakes:
            fakes[id(value)] = _on_gpu(value, mode)
        return fakes[id(value)]

    for module in set(modules_in(program.model)):
        for store in tensor_stores(module):
            store.update({name: fake(value) for name, value in store.items() if isinstance(value, Tensor)})
    args, kwargs = pytree.tree_map(fake, (program.args, dict(program.kwargs)))
    parameters = tuple(program.model.parameters()) if isinstance(program.model, nn.Module) else ()
    model = _LossOnly(program.model) if workload.loss_only else program.model
    return Called(model, args, kwargs, tuple(p for p in parameters if p.requires_grad))


def _of_file(path: str) -> Program:
    return program(path, program_syntax(path, "a Python file with model and inputs"), lambda _: None)


def _of_table(workload: Workload) -> Program:
    model = MODELS[workload.model]
    with torch.device("meta"):
        module, batch = model.build(**workload.sizes).train(), model.batch(**workload.sizes)
    if "loss_type" in vars(module) and module.loss_type is None:
        module.loss_type = "ForCausalLM"  # as it is; else transformers logs so, which breaks the graph before the loss
    return Program(module, (), batch)


def _on_gpu(value: Any, mode: FakeTensorMode) -> Any:
    """A tensor as a FakeTensor on "cuda"; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    with mode:
        fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
    if isinstance(value, nn.Parameter):
        return nn.Parameter(fresh, value.requires_grad)
    return fresh.requires_grad_(value.requires_grad)


class _LossOnly(nn.Module):
    """A model that hands out nothing but its loss."""

    def __init__(self, model: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = self.model(*args, **kwargs)
        return getattr(result, "loss", result)


@contextlib.contextmanager
def as_unpadded_text() -> Iterator[None]:
    """Let transformers make no mask: it cannot see in FakeTensors that nothing is padded or packed."""
    masking = sys.modules.get("transformers.masking_utils")
    with contextlib.ExitStack() as stack:
        if masking is not None:
            stack.enter_context(patch.object(masking, "is_torchdynamo_exporting", lambda: False))
            stack.enter_context(patch.object(masking, "find_packed_sequence_indices", lambda _: None))
        yield
