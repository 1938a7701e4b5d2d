"""Errors of a model's outputs and gradients against float64 under two policies, and where the policies first diverge.

Each policy runs as torch.compile would run it, with the lowering ``"aot_eager"``, including its rules for the backward
and its loss scaling. The reference is the model and its inputs in float64.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxamp.errors import ListingError, PolicyError
from fxamp.tools.common.interrupt import so_far
from fxamp.tools.common.output import notice
from fxamp.tools.common.progress import bar
from fxamp.tools.common.quiet import one_line, quiet
from fxamp.tools.diff.diverge import Divergence, first_divergence
from fxamp.tools.diff.measured import Measured, moved, run
from fxamp.tools.diff.sides import Side
from fxamp.tools.diff.under_policy import run_under, unscaled
from fxamp.tools.inputs.kinds import program_syntax
from fxamp.tools.inputs.model_file import Program, program

PROG = "fxamp-diff"

#: The maximum number of parameters to list.
_WORST = 5


@dataclass(frozen=True)
class Errors:
    """Relative errors against float64, in the 2-norm: of all outputs together, and of the whole gradient.

    inf if a value is not finite, None if there is nothing to compare. ``parameters`` are the gradient's errors by
    parameter, the largest first. ``scale`` is the loss scale of the gradients, None without one.
    """

    output: float | None
    gradient: float | None
    parameters: Mapping[str, float]
    scale: float | None

    def content(self) -> dict[str, Any]:
        """Return the errors as plain data; a non-finite value is written "inf"."""
        return {
            "output": _plain(self.output),
            "gradient": _plain(self.gradient),
            "worst_parameters": {name: _plain(error) for name, error in list(self.parameters.items())[:_WORST]},
            "loss_scale": self.scale,
        }


@dataclass(frozen=True)
class Numbers:
    """The errors under each policy; ``where`` they first diverge: None if nowhere, a string if that is unknown.

    ``random`` means that two runs of the reference differ.
    """

    file: str
    errors: tuple[Errors, Errors]
    where: Divergence | str | None
    random: bool

    def content(self) -> dict[str, Any]:
        """Return the numbers as plain data."""
        old, new = self.errors
        where = self.where.content() if isinstance(self.where, Divergence) else self.where
        return {"file": self.file, "old": old.content(), "new": new.content(), "diverges": where, "random": self.random}


def run_both(file: str, old: Side, new: Side) -> Numbers:
    """Run the model of ``file`` in float64 and under both policies.

    Raises PolicyError if this machine lacks a policy's device, ListingError if the file defines no model or it fails.
    """
    for side in (old, new):
        _require_device(side)
    given = _program(file)
    errors: list[Errors] = []
    with quiet(), bar("runs", 5, "run") as shown, so_far(lambda: _found_so_far(old, errors)):
        references = []
        for seed in (0, 1):
            references.append(_reference(file, given, seed))
            shown.update()
        reference, again = references
        random = any(not _same(one, other) for one, other in zip(reference.outputs, again.outputs, strict=True))
        for side in (old, new):
            errors.append(_errors(reference, *run_under(file, given, side.policy)))
            shown.update()
        where = first_divergence(given, old.policy, new.policy)
        shown.update()
    return Numbers(file, (errors[0], errors[1]), where, random)


def _found_so_far(old: Side, errors: Sequence[Errors]) -> str:
    return f"{old.given}: {errors[0].content()}" if errors else ""


def _reference(file: str, given: Program, seed: int) -> Measured:
    try:
        exact = moved(given, "cpu", torch.float64)
        return run(exact, exact.model, unscaled, seed)
    except Exception as error:
        raise ListingError(f"{file}: the model does not run in float64: {one_line(error)}") from error


def _require_device(side: Side) -> None:
    kind = side.policy.device
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind == "cpu" or (here is not None and here.type == kind):
        return
    raise PolicyError(
        f"--run: policy {side.policy.name!r} is for {kind}, which this machine lacks; accepted: policies for the cpu, "
        f"such as 'cpu-{side.policy.lower_precision_fp}'; or --graph instead, which runs nothing on a device"
    )


def _program(file: str) -> Program:
    tree = program_syntax(file, "a Python file with model and inputs")
    return program(file, tree, lambda text: notice(f"{PROG}: {text}"))


def _errors(reference: Measured, found: Measured, scale: float | None) -> Errors:
    exact = reference.gradients
    other = {name: found.gradients.get(name, torch.zeros_like(gradient)) for name, gradient in exact.items()}
    parameters = {name: _error([gradient], [other[name]]) for name, gradient in exact.items()}
    worst = sorted(parameters.items(), key=lambda item: -item[1])
    gradient = _error(exact.values(), other.values())
    return Errors(
        _error(reference.outputs, found.outputs) if reference.outputs else None,
        gradient if parameters else None,
        dict(worst),
        scale,
    )


def _error(exact: Iterable[Tensor], found: Iterable[Tensor]) -> float:
    """Return |found - exact| / |exact| in the 2-norm over all numbers; |found| if exact is zero."""
    pairs = list(zip(exact, found, strict=True))
    off = math.hypot(*(float((one - other).norm()) for other, one in pairs))
    whole = math.hypot(*(float(other.norm()) for other, _ in pairs))
    error = off / whole if whole else off
    return error if math.isfinite(error) else math.inf


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


def _plain(error: float | None) -> float | str | None:
    return error if error is None or math.isfinite(error) else "inf"
