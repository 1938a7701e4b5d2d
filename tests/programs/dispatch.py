"""What torch dispatches to in this thread, as it was before any program ran.

An error in ``torch.inference_mode`` that torch.compile traces leaves the dispatch keys of the tracing behind: from then
on torch draws no random numbers in this process.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_INCLUDED, _EXCLUDED = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


@contextmanager
def sound_dispatch() -> Iterator[None]:
    """Run a block, or a decorated function, without what an error before it left behind."""
    with torch._C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED):
        yield
