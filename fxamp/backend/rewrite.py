"""``fxamp.rewrite``: insert a policy's casts into a module that runs eagerly."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fxamp.argument_names import named_arguments
from fxamp.backend.auto_products import products
from fxamp.backend.callers_state import follow_grad_mode, keep_callers_state
from fxamp.backend.eager_graph import prepare_eager_graph
from fxamp.backend.options import Options, parse_options
from fxamp.backend.policy_choice import choose_policy
from fxamp.capture import Captured, capture, is_verbatim
from fxamp.capture.autocast_state import autocast_state
from fxamp.capture.dynamo_trace import Traced, trace
from fxamp.capture.shared_state import state_of
from fxamp.errors import CaptureError, OptionError
from fxamp.graph import all_nodes
from fxamp.passes.base import CastContext
from fxamp.pipeline import cast_graph
from fxamp.policy import Policy
from fxamp.policy.model.site import RESULTS
from fxamp.torch_private import compile_lock


@named_arguments
def rewrite(
    source: Callable[..., Any] | GraphModule | ExportedProgram,
    example_inputs: Sequence[Any],
    policy: "str | PathLike[str] | Policy" = "auto",
) -> GraphModule:
    """Capture ``source`` at the pre-dispatch ATen level, insert the casts of ``policy``, and return the new module.

    ``source`` is a function, an nn.Module, a GraphModule or an ExportedProgram. ``example_inputs`` are its positional
    arguments; FakeTensors of any device work, even if this machine lacks the device. Numbers among them and tensor
    sizes become constants. The new module takes the same arguments and runs eagerly. Its outputs have the dtypes that
    the policy gives, as under eager autocast. Every node carries its value in ``meta["val"]``. The module is captured
    with gradients enabled, and follows the grad mode of its caller.

    Rules of region "results" do not apply: the module returns all results.

    Raises OptionError or PolicyError if the policy does not exist or is for another device, CaptureError if ``source``
    cannot be captured as one graph, or changes objects other than by writing to tensors.
    """
    if not isinstance(example_inputs, (tuple, list)):
        raise OptionError(
            f"example_inputs is of type {type(example_inputs).__name__}; accepted: a tuple or list of the arguments"
        )
    options = parse_options({"policy": policy})
    with torch.inference_mode(False), torch.enable_grad():  # so that the graph names each change of the grad mode
        traced, module = _cast(source, example_inputs, options)
    follow_grad_mode(module)
    prepare_eager_graph(module)
    rewritten = traced.bind(module)
    keep_callers_state(rewritten)
    return rewritten


def _cast(source: Any, example_inputs: Sequence[Any], options: Options) -> tuple[Traced, GraphModule]:
    """Capture ``source``, and insert the casts of the policy that ``options`` choose."""
    leaves = [*pytree.tree_leaves(example_inputs), *_state(source)]
    plain = _attempt(source, example_inputs) if options.policy == "auto" else None
    choice = choose_policy(options, leaves, plain[0].module if isinstance(plain, tuple) else None)
    if choice.policy is not None:
        inner_policy = _returning_all(choice.policy)
        if choice.only_regions is None:
            traced, captured, ambient = _captured_for(inner_policy, source, example_inputs)
        else:
            assert isinstance(plain, tuple), "the regions are those of the capture"
            traced, captured, ambient = *plain, None
        cast = cast_graph(captured, CastContext(captured.mode, inner_policy, ambient, only_regions=choice.only_regions))
        if choice.if_it_pays:
            choice = choice.settled(products(cast))
    if choice.policy is None:
        traced, captured = plain if isinstance(plain, tuple) else _captured(source, example_inputs)
    return traced, captured.module


def _returning_all(policy: Policy) -> Policy:
    """Return the policy for a module that returns all its results, in the dtypes that the casts give."""
    return replace(policy, outputs="keep", rules=tuple(rule for rule in policy.rules if rule.region != RESULTS))


def _captured_for(policy: Policy, source: Any, inputs: Sequence[Any]) -> tuple[Traced, Captured, torch.dtype | None]:
    """Capture ``source`` under the policy's autocast if possible, else without autocast; also return that dtype.

    Under autocast a program reads the dtypes that it will get (``y.to(x.dtype)``), and some programs are valid only
    there. Others are valid only without it, because autocast rejects some ops. A call that fxamp leaves verbatim runs
    without autocast, in the dtypes that it was captured with.
    """
    lower: torch.dtype = getattr(torch, policy.lower_precision_fp)
    with autocast_state(policy.device, True, lower):
        under = _attempt(source, inputs)
    if isinstance(under, CaptureError) or any(map(is_verbatim, all_nodes(under[1].module))):
        with autocast_state(policy.device, False):
            outside = _attempt(source, inputs)
        if not isinstance(outside, CaptureError):
            return *outside, None
    if isinstance(under, CaptureError):
        raise under
    return *under, lower


def _attempt(source: Any, inputs: Sequence[Any]) -> tuple[Traced, Captured] | CaptureError:
    try:
        return _captured(source, inputs)
    except CaptureError as error:
        return error


def _captured(source: Any, inputs: Sequence[Any]) -> tuple[Traced, Captured]:
    with compile_lock():
        traced = trace(source, inputs)
        return traced, capture(traced.module, traced.inputs)


def _state(source: object) -> list[torch.Tensor]:
    if isinstance(source, ExportedProgram):
        return list(source.state_dict.values())
    if not isinstance(source, torch.nn.Module):
        return []
    return list(state_of(source).values())
