"""Losses that a rule cuts into chunks, compared with eager autocast's: what may differ is the rounding of the loss.

The reference is the same program whose layers and losses are in float64, of operands and logits that autocast has
rounded. Autocast's own errors against it say how far two programs that round equally well may be from it. Where it
overflows and the reference does not, so may they, or not: a weight's gradient is summed over the chunks in float32.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from programs.compare import Refused, found_in, oracle
from programs.outcome import Outcome
from programs.outcome_differences import compared
from programs.program import Program, Setting
from programs.render import source
from programs.tensors import flat
from programs.ways import breaks, run_compiled, run_eager, run_exact, run_plain
from torch import Tensor

#: How many roundings a loss is made of: its maximum, its sum, the logarithm, the difference, the sum of the rows. That
#: of a sum near one is relative to one, however small its logarithm is.
_ROUNDINGS = 16

#: An error counts if it is too large in the first number of draws of the values, out of the second.
_LARGE, _DRAWS = 3, 5

_ERROR = " has error "


def chunk_differences(program: Program, setting: Setting) -> list[str]:
    """What a rule with ``chunks`` changes beyond rounding.

    Raises Refused where eager autocast raises, and where fxamp differs from it without the rule too.
    """
    differences = _found(program, setting)
    if not differences:
        return []
    if breaks():
        raise Refused(f"Dynamo breaks the graph: {breaks()[0]}")
    if _are_errors(differences) and not _in_most_draws(program, setting):
        raise Refused("roundings that cancel in other values")
    theirs, plain = oracle(run_eager, program, setting), oracle(run_plain, program, setting)
    whole = replace(setting, chunks="")
    without = found_in(lambda: compared(run_compiled(program, whole), theirs, plain, whole))
    if without:
        raise Refused(f"without the rule: {without[0]}")
    return differences


def _found(program: Program, setting: Setting) -> list[str]:
    theirs, exact = oracle(run_eager, program, setting), oracle(run_exact, program, setting)
    return found_in(lambda: _compared(run_compiled(program, setting), theirs, exact, _rounding(program)))


def _are_errors(differences: list[str]) -> bool:
    return all(_ERROR in one for one in differences)


def _in_most_draws(program: Program, setting: Setting) -> bool:
    """Whether other values have as large errors: the terms of a gradient may cancel, and leave their roundings."""
    found = [_found(program, replace(setting, values=draw)) for draw in range(1, 1 + _DRAWS)]
    return not all(map(_are_errors, found)) or sum(map(bool, found)) >= _LARGE


def _compared(ours: Outcome, theirs: Outcome, exact: Outcome, rounding: float) -> Iterator[str]:
    results = zip(ours.results, theirs.results, exact.results, strict=True)
    for at, (one, autocast, true) in enumerate(results):
        eps = torch.finfo(autocast.dtype if autocast.is_floating_point() else torch.float32).eps
        yield from _value(f"result {at}", one, autocast, true, _ROUNDINGS * eps, _norm([true]) + true.numel() ** 0.5)
    if ours.scale not in (theirs.scale, exact.scale):
        yield f"the scale becomes {ours.scale}, with autocast {theirs.scale}"
    gradients = [gradient for gradient in exact.gradients.values() if gradient is not None]
    typical = _norm(gradients) / max(1, sum(gradient.numel() for gradient in gradients)) ** 0.5
    for name, autocast_gradient in theirs.gradients.items():
        yield from _gradient(name, ours.gradients[name], autocast_gradient, exact.gradients, typical, rounding)
    for name, state in theirs.state.items():
        yield from _value(f"{name} after the call", ours.state[name], state, exact.state[name], rounding, typical)


def _rounding(program: Program) -> float:
    """The eps of the coarsest dtype that the program computes in: its own, or bfloat16 where its text has that."""
    return torch.finfo(torch.bfloat16 if "bfloat16" in source(program) else program.lower).eps


def _gradient(
    name: str,
    ours: Tensor | None,
    theirs: Tensor | None,
    exact: Mapping[str, Tensor | None],
    typical: float,
    rounding: float,
) -> Iterator[str]:
    what, true = f"the gradient of {name}", exact[name]
    if ours is None or theirs is None or true is None:
        if ours is not None and flat(ours).nan_to_num(1.0).any() and theirs is None:
            yield f"{what} is there, with autocast it is None"
        elif ours is None and theirs is not None:
            yield f"{what} is None, with autocast it is not"
        return
    if (ours.dtype, ours.layout) != (theirs.dtype, theirs.layout):
        yield f"{what} is {ours.dtype}, {ours.layout}, with autocast {theirs.dtype}, {theirs.layout}"
    yield from _value(what, ours, theirs, true, rounding, max(_norm([true]), typical * true.numel() ** 0.5))


def _value(what: str, ours: Tensor, theirs: Tensor, exact: Tensor, eps: float, size: float) -> Iterator[str]:
    """``eps``: of the rounding that is allowed besides twice autocast's error; ``size``: the norm that is rounded."""
    one, other, true = (flat(tensor).double() for tensor in (ours, theirs, exact))
    if one.shape != other.shape:
        yield f"{what} has shape {tuple(one.shape)}, with autocast {tuple(other.shape)}"
    elif not torch.equal(one.isfinite(), other.isfinite() | (one.isfinite() & true.isfinite())):
        yield f"{what} is finite elsewhere than with autocast"
    else:
        finite = other.isfinite() & true.isfinite()
        error, usual = (_norm([(value - true)[finite]]) for value in (one, other))
        if error > 2 * usual + eps * size:
            yield f"{what}{_ERROR}{error:.3g}, with autocast {usual:.3g}, limit {2 * usual + eps * size:.3g}"


def _norm(tensors: list[Tensor]) -> float:
    return (
        float(sum(float(flat(tensor).double().nan_to_num(0.0, 0.0, 0.0).square().sum()) for tensor in tensors)) ** 0.5
    )
