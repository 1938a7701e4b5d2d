"""The Triton source of the scale update, generated for one rule."""

import functools
import math
from typing import Any

from fxamp.kernels.gradient_request import ScaleRule
from fxamp.kernels.store import load_function

# The factors are float64, as in torch's op; an argument of a Triton kernel would be float32.
TEXT = '''\
"""The update of the loss scale. Written by fxamp.kernels.loss_scale_update_triton, not to be edited."""

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


def update_text(rule: ScaleRule) -> str:
    """Return the Python module that defines the kernel ``update_scale`` for this rule."""
    bounds = (("min_scale", "<", rule.min_scale), ("max_scale", ">", rule.max_scale))
    return TEXT.format(
        growth_factor=rule.growth_factor,
        backoff_factor=rule.backoff_factor,
        growth_interval=rule.growth_interval,
        bounds="".join(
            BOUND.format(name=name, beyond=beyond, bound=float(bound))
            for name, beyond, bound in bounds
            if bound is not None and math.isfinite(bound)
        ),
    )


@functools.lru_cache(maxsize=64)
def update_function(rule: ScaleRule, interpret: bool) -> Any:
    """Return the kernel of this rule, to launch on one program; ``interpret``: in Triton's interpreter."""
    return load_function("update_scale", update_text(rule), interpret)
