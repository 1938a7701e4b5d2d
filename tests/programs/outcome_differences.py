"""How one outcome of a program differs from another, bit for bit, as messages."""

from collections.abc import Iterator

import torch
from programs.outcome import Outcome
from programs.program import Setting
from programs.tensors import flat
from torch import Tensor

#: What a message says of a gradient that is nothing but zeros, or zeros and NaN, where the other outcome has None.
ZEROS, NAN = "all zeros", "zeros but for NaN"
EXTRA = "with autocast it is None"
#: What comes before the amount by which a value differs.
BY = " differs by up to "
#: How a message about results that share memory begins.
SHARED = "shared memory: "


def compared(got: Outcome, expected: Outcome, plain: Outcome, setting: Setting) -> Iterator[str]:
    """How ``got`` differs from ``expected``, bit for bit; ``plain`` has the captured dtypes."""
    for i, (ours, theirs) in enumerate(zip(got.results, expected.results, strict=True)):
        if ours.dtype not in _result_dtypes(plain.results[i].dtype, theirs.dtype, setting):
            yield f"result {i} is {ours.dtype}, captured {plain.results[i].dtype}, with autocast {theirs.dtype}"
        yield from _values(f"result {i}", ours, theirs)
    for name, theirs in expected.gradients.items():
        yield from gradient_differences(f"the gradient of {name}", got.gradients.get(name), theirs, setting)
    for name, theirs in expected.state.items():
        yield from _values(f"{name} after the call", got.state[name], theirs, _sum_error(theirs, setting))
    if got.scale != expected.scale:
        yield f"the scale becomes {got.scale}, with autocast {expected.scale}"
    if got.same != expected.same:
        yield f"one object: {sorted(got.same)}, with autocast {sorted(expected.same)}"
    if got.shared != expected.shared:
        yield f"{SHARED}{sorted(got.shared)}, with autocast {sorted(expected.shared)}"


def _result_dtypes(captured: torch.dtype, autocast: torch.dtype, setting: Setting) -> set[torch.dtype]:
    """What may leave a graph: the captured dtype, or what holds it and autocast's; float32 where a loss is scaled.

    A rewritten program returns autocast's.
    """
    if setting.schedule == "rewritten":
        return {autocast}
    wide = torch.promote_types(captured, autocast)
    narrow = {autocast} if captured.itemsize == 2 else set()
    return {wide, torch.promote_types(wide, torch.float32), *narrow} if setting.scaled else {wide, *narrow}


def _sum_error(theirs: Tensor, setting: Setting) -> float:
    """The error of another order of summation: an eager region with a scaler sums the gradients of each call first."""
    several = setting.schedule == "together" or setting.parted
    finite = theirs.detach()[theirs.isfinite()] if theirs.layout is torch.strided else theirs.detach()
    if not (setting.scaled and setting.lowering == "eager" and several and finite.numel()):
        return 0.0
    return 4 * torch.finfo(torch.float32).eps * float(finite.abs().max())


def gradient_differences(what: str, ours: Tensor | None, theirs: Tensor | None, setting: Setting) -> Iterator[str]:
    """How one gradient, which ``what`` names, differs; None is one too."""
    if ours is None or theirs is None:
        if ours is not None and theirs is None:
            yield f"{what} is {_holds(flat(ours))}, {EXTRA}"
        elif theirs is not None:
            yield f"{what} is None, with autocast it is not"
        return
    if (ours.dtype, ours.layout) != (theirs.dtype, theirs.layout):
        yield f"{what} is {ours.dtype}, {ours.layout}, with autocast {theirs.dtype}, {theirs.layout}"
    yield from _values(what, ours, theirs, _sum_error(theirs, setting))


def _holds(gradient: Tensor) -> str:
    if gradient.nan_to_num(0.0, 1.0, 1.0).any():
        return "there"
    return NAN if gradient.isnan().any() else ZEROS


def _values(what: str, ours: Tensor, theirs: Tensor, error: float = 0.0) -> Iterator[str]:
    a, b = flat(ours).double(), flat(theirs).double()
    if a.shape != b.shape:
        yield f"{what} has shape {tuple(a.shape)}, with autocast {tuple(b.shape)}"
    elif not bool((a.eq(b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= error)).all()):
        yield f"{what}{BY}{(a - b).abs().max():.3g}"
