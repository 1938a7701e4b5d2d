"""Run time of loss scaling: the scaler that a training loop talks to, and what it is made of."""

from fxamp.scaler.grad_scaler import GradScaler
from fxamp.scaler.state import StepResult

__all__ = ["GradScaler", "StepResult"]
