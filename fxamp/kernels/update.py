"""The scale update: grow after enough good steps, back off after a bad one. One program, no host sync.

It is a kernel of its own. Folded into the last program of the check it would save one short launch, but there may be
several launches, an aborted one would leave the counter wrong, and ranks must agree on the flag first.
"""

import functools
import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fxamp.errors import OptionError
from fxamp.kernels import reference
from fxamp.kernels.dispatch import Implementation, implementation
from fxamp.kernels.store import load_function

# The factors are float64, as in torch's op; an argument of a Triton kernel would be float32.
TEXT = '''\
"""The update of the loss scale. Written by fxamp.kernels.update, not to be edited."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["scale", "growth_tracker", "found_inf"])
def update_scale(scale, growth_tracker, found_inf):
    old = tl.load(scale)
    wide = old.to(tl.float64)
    grown = (wide * tl.full((), {growth_factor!r}, tl.float64)).to(tl.float32)
    backed_off = (wide * tl.full((), {backoff_factor!r}, tl.float64)).to(tl.float32)
    steps = tl.load(growth_tracker) + 1
    due = steps >= {growth_interval!r}
    bad = tl.load(found_inf) != 0.0
    fits = (grown.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000  # within float32
    new = tl.where(bad, backed_off, tl.where(due & fits, grown, old))
{bounds}    tl.store(scale, new)
    tl.store(growth_tracker, tl.where(bad | due, 0, steps))
'''
BOUND = "    new = tl.where(new {beyond} {bound!r}, {bound!r}, new)  # {name}; NaN stays\n"


def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float | None = None,
    max_scale: float | None = None,
) -> None:
    """Update the loss scale in place, by the rule of ``torch._amp_update_scale_``.

    If ``found_inf`` is not 0, the scale is multiplied by ``backoff_factor`` and the tracker starts again at 0. Else the
    tracker counts one more good step; once it reaches ``growth_interval`` it starts again at 0 and the scale is
    multiplied by ``growth_factor``, unless that would exceed float32. Products are float64, rounded to float32.

    Two things differ from torch's op: "reaches" is ``>=`` (torch: ``==``, so that a scale whose interval is lowered
    below its tracker never grows again), and the result is held within ``min_scale`` and ``max_scale``.

    Args:
        scale: one float32.
        growth_tracker: one int32 on the scale's device: good steps in a row.
        found_inf: one float32 on the scale's device.
        growth_factor: usually > 1.
        backoff_factor: usually between 0 and 1.
        growth_interval: good steps before the scale grows.
        min_scale: the least scale, or None for no such bound.
        max_scale: the greatest scale, or None for no such bound.

    Raises:
        OptionError: a factor is inf or NaN.
    """
    for name, factor in (("growth_factor", growth_factor), ("backoff_factor", backoff_factor)):
        if not math.isfinite(factor):
            raise OptionError(f"{name}: expected a finite number, got {factor}")
    chosen = implementation(scale.device)
    rule = float(growth_factor), float(backoff_factor), int(growth_interval), min_scale, max_scale
    if chosen is Implementation.REFERENCE:
        reference.update_scale(scale, growth_tracker, found_inf, *rule)
        return
    kernel = _function(*rule, interpret=chosen is Implementation.INTERPRETER)
    with torch.cuda.device(scale.device) if scale.device.type == "cuda" else nullcontext():
        kernel[(1,)](scale, growth_tracker, found_inf, num_warps=1, enable_fp_fusion=False)
    torch.autograd.graph.increment_version([scale, growth_tracker])


def update_text(
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float | None = None,
    max_scale: float | None = None,
) -> str:
    """Return the Python module that defines the kernel ``update_scale`` for this rule."""
    bounds = (("min_scale", "<", min_scale), ("max_scale", ">", max_scale))
    return TEXT.format(
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        bounds="".join(
            BOUND.format(name=name, beyond=beyond, bound=float(bound))
            for name, beyond, bound in bounds
            if bound is not None and math.isfinite(bound)
        ),
    )


@functools.lru_cache(maxsize=64)
def _function(
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float | None,
    max_scale: float | None,
    interpret: bool,
) -> Any:
    text = update_text(growth_factor, backoff_factor, growth_interval, min_scale, max_scale)
    function = load_function("update_scale", text)
    if not interpret:
        return function
    from fxamp.kernels.interpreter import Interpreted

    return Interpreted(function)
