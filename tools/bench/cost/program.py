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

from fxamp.tools.bench.cost.workload import Workload
from fxamp.tools.bench.models import MODELS, LossAlone
from fxamp.tools.inputs.fake_program import fake_program
from fxamp.tools.inputs.model_file import Program, program


@dataclass(frozen=True)
class Called:
    """A model, what it is called with, and its parameters."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    parameters: tuple[Tensor, ...]


@contextlib.contextmanager
def fake_workload(workload: Workload, mode: FakeTensorMode) -> Iterator[Called]:
    """Make the workload's program, with tensors of ``mode`` on "cuda" for all of its tensors.

    Raises ListingError if a file of the user's defines no model and inputs.
    """
    made = _of_table(workload) if workload.model in MODELS else program(workload.model, lambda _: None)
    with fake_program(made, mode, "cuda", last_use=True) as fake:
        parameters = tuple(fake.model.parameters()) if isinstance(fake.model, nn.Module) else ()
        model = LossAlone(fake.model) if workload.loss_only else fake.model
        yield Called(model, fake.args, fake.kwargs, tuple(p for p in parameters if p.requires_grad))


def _of_table(workload: Workload) -> Program:
    model = MODELS[workload.model]
    with torch.device("meta"):
        module, batch = model.build(**workload.sizes).train(), model.batch(**workload.sizes)
    return Program(module, (), batch)


@contextlib.contextmanager
def as_unpadded_text() -> Iterator[None]:
    """Keep transformers from making a mask: it cannot see in FakeTensors that nothing is padded or packed."""
    masking = sys.modules.get("transformers.masking_utils")
    with contextlib.ExitStack() as stack:
        if masking is not None:
            stack.enter_context(patch.object(masking, "is_torchdynamo_exporting", lambda: False))
            stack.enter_context(patch.object(masking, "find_packed_sequence_indices", lambda _: None))
        yield
