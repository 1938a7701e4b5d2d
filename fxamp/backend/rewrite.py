"""``fxamp.rewrite``: the casts of a policy, made explicit in a module that runs eagerly."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fxamp.backend.choose import choose_policy
from fxamp.backend.compile import apply_policy
from fxamp.backend.options import parse_options
from fxamp.capture import capture
from fxamp.capture.autocast_state import ambient_autocast
from fxamp.capture.dynamo import trace
from fxamp.errors import OptionError
from fxamp.policy import Policy


def rewrite(
    source: Callable[..., Any] | GraphModule | ExportedProgram,
    example_inputs: Sequence[Any],
    policy: "str | PathLike[str] | Policy" = "auto",
) -> GraphModule:
    """Capture ``source`` at the pre-dispatch ATen level, insert the casts of ``policy``, return the new module.

    ``source`` is a function, an nn.Module, a GraphModule or an ExportedProgram. ``example_inputs`` are its positional
    arguments; FakeTensors of any device are welcome, whether this machine has the device or not. The numbers among
    them, and the sizes of tensors, are constants of the result. It takes the same arguments and runs eagerly; what it
    returns has the dtypes that the policy gives, as under eager autocast. Every node carries its value in
    ``meta["val"]``.

    Raises OptionError or PolicyError for a policy that does not exist or is for another device, CaptureError if
    ``source`` cannot be captured as one graph.
    """
    if not isinstance(example_inputs, (tuple, list)):
        raise OptionError(
            f"example_inputs is of type {type(example_inputs).__name__}; accepted: a tuple or list of the arguments"
        )
    options = parse_options({"policy": policy})
    leaves = [*pytree.tree_leaves(example_inputs), *_state(source)]
    choice = choose_policy(options, leaves)
    traced = trace(source, example_inputs)
    captured = capture(traced.module, traced.inputs)
    if choice.policy is not None:
        kept = replace(choice.policy, outputs="keep")
        ambient = ambient_autocast(kept.device)
        apply_policy(captured, kept, ambient, choice.why)
    return traced.bind(captured.module)


def _state(source: object) -> list[torch.Tensor]:
    if isinstance(source, ExportedProgram):
        return list(source.state_dict.values())
    return [*source.parameters(), *source.buffers()] if isinstance(source, torch.nn.Module) else []
