"""Create FakeTensors for the inputs of a graph, so that tracing never changes a user's buffer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxamp.graph import fake_mode_of, is_wrapper
from fxamp.torch_private import outside_transforms, real_object
from fxamp.torch_private.parts.fx import TracingContext, transform_subclass


def fake_inputs(inputs: Sequence[Any]) -> tuple[list[Any], FakeTensorMode]:
    """Return FakeTensors for ``inputs``, and their common fake mode.

    Inside torch.compile the FakeTensors share the ambient ShapeEnv and follow Dynamo's symbolic contexts, so dynamic
    sizes stay the symbols that Dynamo guards on. The mode is a new one: AOTAutograd caches its fakes by the real
    tensor, and an op that changes metadata in place would change them. FakeTensors keep their mode. Every tensor of the
    result is a new one, even if one tensor is passed twice. Anything that is not a tensor is returned unchanged.
    """
    modes = [fake_mode_of(value) for value in inputs if isinstance(value, torch.Tensor)]
    mode = next((mode for mode in modes if mode is not None), None)
    if mode is not None:
        return [_refake(value, mode) if isinstance(value, torch.Tensor) else value for value in inputs], mode
    context = TracingContext.try_get()
    ambient = context.fake_mode if context is not None else None
    shape_env = ambient.shape_env if ambient is not None else ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True, static_shapes=ambient is None)
    contexts: Any = context.tensor_to_context if context is not None else {}

    def convert(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        symbolic = contexts.get(value)
        source = symbolic.tensor_source if symbolic is not None else None
        fake = mode.from_tensor(value, symbolic_context=symbolic, source=source)
        if is_wrapper(fake) and fake._is_view():  # make_fx fails to convert it if its sizes are dynamic
            return _refake(fake, mode).requires_grad_(fake.requires_grad)
        return fake

    fakes: list[Any] = []
    known: set[int] = set()
    for fake in map(convert, inputs):  # a tensor that is given twice becomes one FakeTensor
        fakes.append(fake_like(fake, mode) if id(fake) in known else fake)
        known.add(id(fake))
    return fakes, mode


def fake_like(value: Any, mode: FakeTensorMode) -> Any:
    """Return the value with every tensor replaced by a new, empty one in ``mode`` with its metadata.

    The tracer identifies a value by its tensor: two inputs of a graph with one tensor would become one input.
    """
    if isinstance(value, torch.Tensor):
        return _refake(value, mode)
    if isinstance(value, (tuple, list)):
        return type(value)(fake_like(item, mode) for item in value)
    return value


def _refake(value: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    value = outside_transforms(value)
    own = fake_mode_of(value)
    if own is None:
        return mode.from_tensor(value)
    if is_wrapper(value):
        rebuild: Any = transform_subclass
        remade: torch.Tensor = rebuild(value, lambda _, part: fake_like(real_object(part), mode))
        return remade
    with mode:
        if own is mode:
            return value.detach().requires_grad_(value.requires_grad)
        fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return fresh.requires_grad_(value.requires_grad and (value.is_floating_point() or value.is_complex()))
