"""The torch.compile backend: options, policy selection, capture, passes, lowering."""

from fxamp.backend.entry_point import fxamp
from fxamp.backend.rewrite import rewrite
