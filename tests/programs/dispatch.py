"""The state of torch in this thread, as it was before a run: what an error leaves behind would spoil the runs after it.

- An error in ``torch.inference_mode`` that torch.compile traces leaves the dispatch keys of the tracing: from then on
  torch draws no random numbers in this process.
- An error in an autocast region of a graph under torch's "eager" leaves the region open: from then on eager autocast
  reads stale weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException

from fxamp.capture.autocast_state import autocast_depth, regions_closed_on_error

_INCLUDED, _EXCLUDED = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


@contextmanager
def sound_dispatch() -> Iterator[None]:
    """Run a block, or a decorated function, without what an error before it left behind."""
    with torch._C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED):
        yield


class OpenRegions(BaseException):
    """A run left a region of autocast or grad mode open; no comparison may take it for an error of the program."""


#: How Dynamo says that it left a region open itself, as an error in a body of an op that it traces makes it do.
_BY_DYNAMO = "state changed while dynamo tracing"


@contextmanager
def reporting_open_regions() -> Iterator[None]:
    """Raise OpenRegions, with the regions closed, if the block leaves one open, whether it raises or not."""
    before = autocast_depth(), torch.is_grad_enabled()
    with regions_closed_on_error():
        try:
            yield
        except Exception as error:
            if not _in_dynamo(error):
                _require_closed(before)
            raise
        _require_closed(before)


def _in_dynamo(error: Exception) -> bool:
    """Whether Dynamo raised while it traced, before any backend was called."""
    traced = isinstance(error, TorchDynamoException) and not isinstance(error, BackendCompilerFailed)
    return traced or _BY_DYNAMO in str(error)


def _require_closed(before: tuple[int, bool]) -> None:
    after = autocast_depth(), torch.is_grad_enabled()
    if after != before:
        raise OpenRegions(f"autocast's depth and grad mode are {before} before the run and {after} after it")
