"""The entry point that ``torch.compile(model, backend="fxamp")`` calls with each graph that Dynamo captured."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from fxamp.backend.casting import cast_graph
from fxamp.backend.compilation import Compilation
from fxamp.backend.lowering import lower_graph
from fxamp.backend.options import parse_options
from fxamp.backend.participants import participants
from fxamp.backend.policy_choice import choose_policy, device_of, guard_policy
from fxamp.errors import BannedOpError, CaptureError, MachineError, OptionError, PolicyError
from fxamp.nonfinite.watching import Watching
from fxamp.reports.breaks import why_ended
from fxamp.reports.dumps import Stages
from fxamp.reports.registry import forget_autocast, remember
from fxamp.scaler.graphs.unscaled import warn_unscaled
from fxamp.torch_private import raised_through_dynamo


def fxamp(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile ``gm`` in mixed precision; ``example_inputs`` are its inputs, real or fake, in placeholder order.

    ``options`` and ``mode`` are torch.compile's. The returned callable takes the same inputs and returns the outputs as
    a tuple, in the dtypes that Dynamo captured. Raises OptionError or PolicyError before it traces anything. Dynamo
    passes an error of the user's on unchanged.
    """
    try:
        return _compile(gm, example_inputs, options, mode)
    except (OptionError, PolicyError, BannedOpError, CaptureError, MachineError) as error:
        raise raised_through_dynamo(error, fxamp, inspect.currentframe()) from None


fxamp.reset = forget_autocast  # type: ignore[attr-defined]  # torch._dynamo.reset calls it


def _compile(
    gm: GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any] | None, mode: str | None
) -> Callable[..., Any]:
    parsed = parse_options(options, mode)
    choice = choose_policy(parsed, example_inputs, gm)
    guard_policy(parsed, choice, device_of(example_inputs))
    if parsed.scaler is None:
        warn_unscaled(choice.policy, parsed.policy != "auto", example_inputs)
    ended = why_ended(gm)
    taking_part = participants(choice.policy, parsed, gm, ended)
    stages = Stages(parsed.dump)
    choice = replace(choice, lstm_kernel=parsed.lowering == "eager" or not torch.is_grad_enabled())
    watching = next((participant for participant in taking_part if isinstance(participant, Watching)), None)
    module, record, choice = cast_graph(gm, example_inputs, choice, stages, ended, watching)
    if choice.policy is None:
        taking_part = () if watching is None else (watching,)
    compilation = Compilation(choice.policy, parsed.lowering, stages, taking_part)
    compiled = lower_graph(module, example_inputs, parsed, compilation)
    record = replace(record, kept=compilation.kept, found=None if watching is None else watching.monitor.found)
    return remember(record, choice.under_autocast).noting(compiled, example_inputs)
