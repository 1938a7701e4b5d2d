"""Errors of a model's outputs and gradients against float64 under two policies, and where the policies first diverge.

Each policy runs as torch.compile would run it, with the lowering ``"aot_eager"``, including its rules for the backward
and its loss scaling. The reference is the model and its inputs in float64.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxamp.errors import ListingError, PolicyError
from fxamp.tools.common.interrupt import so_far
from fxamp.tools.common.output import notice
from fxamp.tools.common.progress import bar
from fxamp.tools.common.silence import one_line, quiet
from fxamp.tools.diff.diverge import Divergence, copied, first_divergence, plain
from fxamp.tools.diff.sides import PROG, Side
from fxamp.tools.inputs.measurement import Results, floating, relative, under_policy
from fxamp.tools.inputs.model_file import Program, program, require_own_tensors

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
            "output": plain(self.output),
            "gradient": plain(self.gradient),
            "worst_parameters": {name: plain(error) for name, error in list(self.parameters.items())[:_WORST]},
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
    defined = program(file, lambda text: notice(f"{PROG}: {text}"))
    require_own_tensors(file, defined.model)
    errors: list[Errors] = []
    with quiet(), bar("runs", 5, "run") as progress, so_far(lambda: _errors_so_far(old, errors)):
        references = []
        for seed in (0, 1):
            references.append(_reference(file, defined, seed))
            progress.update()
        for side in (old, new):
            here = copied(defined, side.policy.device)
            errors.append(_errors(references[0], *under_policy(file, here, side.policy, "aot_eager", start)))
            progress.update()
        where = first_divergence(defined, old.policy, new.policy)
        progress.update()
    return Numbers(file, (errors[0], errors[1]), where, not references[0].same_outputs(references[1]))


def start(output: Any) -> list[tuple[Tensor, Tensor]]:
    """Return the values at which the backward starts: the scalar outputs, which are losses, if there are any.

    Otherwise it starts at every floating-point output, with normal random numbers that are the same in all runs; a
    sum, for example of a softmax, could hide an error.
    """
    values = [value for value in floating(output) if value.requires_grad]
    values = [value for value in values if value.dim() == 0] or values
    return [(value, _cotangent(value)) for value in values]


def _cotangent(value: Tensor) -> Tensor:
    if value.dim() == 0:
        return torch.ones_like(value)
    numbers = torch.randn(value.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return numbers.to(value.device, value.dtype)


def _errors_so_far(old: Side, errors: Sequence[Errors]) -> str:
    return f"{old.source}: {errors[0].content()}" if errors else ""


def _reference(file: str, program: Program, seed: int) -> Results:
    try:
        exact = copied(program, "cpu", torch.float64)
        return exact.run(exact.model, start, seed=seed)
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


def _errors(reference: Results, results: Results, scale: float | None) -> Errors:
    exact, gradients = reference.gradients, results.gradients_of(reference)
    parameters = {name: relative([gradients[name]], [gradient]) for name, gradient in exact.items()}
    return Errors(
        relative(results.outputs, reference.outputs) if reference.outputs else None,
        relative([*gradients.values()], [*exact.values()]) if parameters else None,
        dict(sorted(parameters.items(), key=lambda item: -item[1])),
        scale,
    )
