"""Methods that torch.compile leaves alone: a scaler's work is eager, wherever it is called.

Traced, a scaler would become part of the graphs that it scales, and read the device's values on the host. So a
compiled function that calls one breaks there, and goes on behind it.
"""

from torch._compile import _disable_dynamo

#: The form that imports Dynamo at the first call only; torch's optimizers use it. Were it gone, ``import`` would fail.
untraced = _disable_dynamo
