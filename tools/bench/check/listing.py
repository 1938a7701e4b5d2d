"""All checks, in the order in which they run: what is cheap and tells most comes first."""

from fxamp.tools.bench.check.gradients import gradient_checks
from fxamp.tools.bench.check.kernels import kernel_checks
from fxamp.tools.bench.check.outcome import Check
from fxamp.tools.bench.check.training import training_checks


def checks(device: str, lowering: str) -> list[Check]:
    """Return the checks of ``device``, "cpu" or "cuda", with compiled graphs of ``lowering``."""
    return [*kernel_checks(device), *training_checks(device, lowering), *gradient_checks(device, lowering)]
