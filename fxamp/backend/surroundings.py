"""What the code around a call says about precision, besides what Dynamo guards on: autocast switched off, training.

Dynamo compiles a model again where autocast is on or off, and where gradients are on or off. It does not distinguish a
program that has switched autocast off from one that has none, nor a reentrant checkpoint, which runs its forward
without gradients, from an evaluation.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

import torch
from torch.utils.checkpoint import CheckpointFunction

from fxamp.capture.autocast_state import autocast_depth
from fxamp.reports.registry import follows_autocast
from fxamp.reports.runs import caller


@dataclass(frozen=True)
class Surroundings:
    """``off``: the program uses torch.autocast, and not here. ``trains``: gradients are on, or will be computed."""

    off: bool
    trains: bool

    @staticmethod
    def now(parameters: Sequence[torch.Tensor] = ()) -> "Surroundings":
        """Return those of the running call of a compiled model or function; its graph reads ``parameters``."""
        off = autocast_depth() > 0 or follows_autocast(caller(sys._getframe(1)), parameters)
        return Surroundings(off, torch.is_grad_enabled() or _inside_checkpoint(sys._getframe(1)))


def _inside_checkpoint(frame: FrameType | None) -> bool:
    """Whether a reentrant checkpoint runs its forward: its backward runs the same code again, with gradients."""
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame is not None
