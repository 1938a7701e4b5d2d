"""The same training in float64, as the reference for distances."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fxamp.tools.bench.optimizers.scenario import Scenario
from fxamp.tools.bench.optimizers.training import Training
from fxamp.torch_dtypes import NARROW


class Float64(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Skips casts of float64 to 16 bits, with which an optimizer (Muon) trades accuracy for speed.

    With them, a float64 training would round like torch's and would be no reference.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].dtype is torch.float64 and kwargs.get("dtype") in NARROW:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def train_exactly(training: Training, scenario: Scenario) -> Training:
    """Run ``training``, whose parameters are float64, without ever computing in 16 bits; returns it."""
    with Float64():  # type: ignore[no-untyped-call]
        return training.run(scenario)
