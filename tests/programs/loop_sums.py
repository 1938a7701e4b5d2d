"""Gradients that a loop sums: it adds its terms before autograd adds the others.

The oracle unrolls loops, and no order of its sums is that. So errors against float32 are compared.
"""

from dataclasses import replace

import torch
from programs.orders import ORDERS, random_order
from programs.program import Program, Setting
from programs.tensors import flat
from programs.ways import run_compiled, run_eager, run_plain
from torch import Tensor


def loop_rounds_as_well(program: Program, setting: Setting, different: set[str]) -> bool:
    """Whether a program with a loop has no larger errors in these gradients than eager autocast.

    Eager autocast's errors are the largest in any order of its sums, and at most a hundredth of the gradient.
    """
    if {"looped", "scanned"}.isdisjoint(program.kinds()):
        return False
    try:
        exact = run_plain(program, replace(setting, scaled=False)).gradients
    except Exception:  # the program needs autocast
        return False
    eager = []
    for seed in range(ORDERS):
        with random_order(seed):
            eager.append(run_eager(program, setting).gradients)
    ours = run_compiled(program, setting).gradients
    for name in (name for name in exact if f"the gradient of {name}" in different):
        largest = max(_error(gradients[name], exact[name]) for gradients in eager)
        if not _error(ours[name], exact[name]) <= largest <= _error(exact[name], None) / 100:
            return False
    return True


def _error(gradient: Tensor | None, exact: Tensor | None) -> float:
    """The largest difference of two gradients; None is zero."""
    both = [flat(each).double() if each is not None else torch.zeros(()) for each in (gradient, exact)]
    return float((both[0] - both[1]).abs().max())
