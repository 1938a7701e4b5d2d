"""The torch.compile backend: options, choice of policy, capture, passes, lowering."""

from fxamp.backend.compile import fxamp
from fxamp.backend.rewrite import rewrite

__all__ = ["fxamp", "rewrite"]
