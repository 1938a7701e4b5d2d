"""Update the loss scale: grow after enough good steps, back off after a bad one. One program, no host sync.

It is a separate kernel. Merging it into the last program of the check would save one short launch, but the check may
take several launches, an aborted launch would leave the counter wrong, and ranks must agree on the flag first.
"""

import math

import torch
from torch import Tensor

from fxamp.errors import OptionError
from fxamp.kernels import reference
from fxamp.kernels.dispatch import Implementation, implementation
from fxamp.kernels.gradient_request import ScaleRule
from fxamp.kernels.loss_scale_update_triton import update_function
from fxamp.torch_devices import on_device


def update_scale_(scale: Tensor, growth_tracker: Tensor, found_inf: Tensor, rule: ScaleRule) -> None:
    """Update the loss scale in place, by the rule of ``torch._amp_update_scale_``.

    If ``found_inf`` is not 0, the scale is multiplied by ``backoff_factor`` and the tracker is reset to 0. Else the
    tracker counts one more good step. When it reaches ``growth_interval`` it is reset to 0, and the scale is multiplied
    by ``growth_factor`` unless that would overflow float32. Products are computed in float64 and rounded to float32.

    Two things differ from torch's op: "reaches" is ``>=`` (torch: ``==``, so that a scale whose interval is lowered
    below its tracker never grows again), and the result is clamped to ``min_scale`` and ``max_scale``.

    Args:
        scale: one float32.
        growth_tracker: one int32 on the scale's device: the number of consecutive good steps.
        found_inf: one float32 on the scale's device.
        rule: the factors, the interval and the bounds.

    Raises:
        OptionError: a factor is inf or NaN.
    """
    for name, factor in (("growth_factor", rule.growth_factor), ("backoff_factor", rule.backoff_factor)):
        if not math.isfinite(factor):
            raise OptionError(f"{name}: expected a finite number, got {factor}")
    chosen = implementation(scale.device)
    if chosen in (Implementation.REFERENCE, Implementation.HOST):
        reference.update_scale(scale, growth_tracker, found_inf, rule)
        return
    kernel = update_function(rule, interpret=chosen is Implementation.INTERPRETER)
    with on_device(scale.device):
        kernel[(1,)](scale, growth_tracker, found_inf, num_warps=1, enable_fp_fusion=False)
    torch.autograd.graph.increment_version([scale, growth_tracker])
