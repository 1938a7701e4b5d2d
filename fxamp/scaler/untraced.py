"""Keep torch.compile from tracing a scaler's methods: they run eagerly wherever they are called.

If it were traced, a scaler would become part of the graphs that it scales, and would read device values on the host.
So a compiled function that calls such a method has a graph break there.
"""

from torch._compile import _disable_dynamo

#: This form imports Dynamo at the first call only; torch's optimizers use it. If torch removes it, ``import`` fails.
untraced = _disable_dynamo
