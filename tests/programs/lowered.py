"""Where eager autocast's cache of casts is no oracle, and what the oracle's source says instead.

Autocast casts a leaf that needs a gradient once, and sums its gradients in 16 bits. So does fxamp, but

1. in a region of another dtype a leaf gets a cast of that dtype, where autocast hands out the one it has;
2. in the body of a checkpoint or a cond a leaf is cast apart from the casts outside: its gradients meet in float32.

There the operands of ops that autocast lowers are marked while a program is drawn, ``lowered(self.w0)``, and the
oracle's source casts them by :class:`Lowered`. Elsewhere, and in every other flavour, the mark is taken away.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from programs import device
from programs.place import Place
from torch import Tensor

_MARK = re.compile(r"lowered\(([\w.]+(?:\.t\(\))?)\)")
_PART = re.compile(_MARK.pattern + r"(?=\[)")
"""A part of a leaf is no leaf: autocast casts it by itself."""


def unmarked(code: str) -> str:
    """``code`` without marks."""
    return _MARK.sub(r"\1", code)


def marked(code: str, place: Place, lower: torch.dtype | None) -> str:
    """``code`` with the calls of :class:`Lowered` that it needs at ``place``; ``lower``: outside of all regions."""
    special = place.cached and (place.body or (place.region and place.lower not in (None, lower)))
    code = _PART.sub(r"\1", code)
    return _MARK.sub(rf'lowered(\1, "\1", "{place.body}")', code) if special else unmarked(code)


def exactly(tensor: Tensor) -> Tensor:
    """``tensor`` as an op reads it that autocast lowers, in float64; its gradient is not rounded."""
    lower = torch.get_autocast_dtype(device.current()) if torch.is_autocast_enabled(device.current()) else torch.float32
    exact = tensor.double()
    return exact + (tensor.to(lower).double() - exact).detach()


class Lowered:
    """Casts leaves that need a gradient to autocast's dtype, once for each dtype, grad mode and body of a function."""

    def __init__(self) -> None:
        self._casts: dict[Any, Tensor] = {}
        self._names: dict[Any, str] = {}

    @contextmanager
    def region(self) -> Iterator[None]:
        """An outermost region: autocast forgets its casts at the end."""
        yield
        self._casts.clear()

    def __call__(self, tensor: Tensor, name: str, body: str) -> Tensor:
        """The cast of ``tensor``, which the code in ``body`` calls ``name``.

        Raises RuntimeError where it has another name too: a body's operands are cast apart, even if they are one.
        """
        if not (torch.is_autocast_enabled(device.current()) and tensor.is_leaf and tensor.requires_grad):
            return tensor
        if body and self._names.setdefault((id(tensor), body), name) != name:
            raise RuntimeError("one leaf has two names in a body")
        dtype = torch.get_autocast_dtype(device.current())
        key = (id(tensor), body, dtype, torch.is_grad_enabled())
        if key not in self._casts:
            self._casts[key] = tensor.to(dtype)
        return self._casts[key]
