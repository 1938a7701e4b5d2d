"""States of torch in which code is traced."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import RLock
from typing import Any, TypeVar

import torch

Mode = TypeVar("Mode")

#: The flag is process-wide: while one thread has set it, no other thread may read its previous value.
_compiling = RLock()


def replace_tracing_mode(kind: type[Mode]) -> Mode:
    """Return the tracing mode of the running make_fx call as ``kind``, a subclass of its class without fields.

    make_fx creates its mode itself and accepts no other, so the mode's class is replaced. Breaks loudly: with TypeError
    if the mode's memory layout changes, with AttributeError if torch moves it.
    """
    modes: Any = torch._ops
    mode: Any = modes._get_dispatch_mode_pre_dispatch(torch._C._TorchDispatchModeKey.PROXY)
    mode.__class__ = kind
    own: Mode = mode
    return own


@contextmanager
def compiling_flag() -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` true inside, in every thread; only one thread at a time can be inside.

    So torch's optimizers take the path that reads no value on the host. If torch renames the flag, they read values of
    fake tensors, and their steps are left to the host.
    """
    with _compiling:
        before = torch.compiler._is_compiling_flag
        torch.compiler._is_compiling_flag = True
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag = before


def without_autocast() -> AbstractContextManager[Any]:
    """Disable autocast for every device inside; restore it on exit. Breaks loudly."""
    return torch._C._DisableAutocast()
