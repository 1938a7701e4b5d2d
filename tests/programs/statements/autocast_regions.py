"""Autocast regions of the program's own: nested, in a row, off, of either dtype."""

from dataclasses import replace

import torch
from programs.draft import Draft
from programs.statements.registry import statement

_HALVES = (torch.bfloat16, torch.float16)


@statement(weight=2)
def region_off(d: Draft) -> None:
    _region(d, 'with torch.autocast("cpu", enabled=False):', None)


@statement(weight=2)
def region(d: Draft) -> None:
    dtype = d.pick(_HALVES)
    _region(d, f'with torch.autocast("cpu", {dtype}):', dtype)


@statement()
def regions_in_a_row(d: Draft) -> None:
    """Two of one dtype, which may cast the same weights."""
    dtype = d.pick(_HALVES)
    for _ in range(2):
        _region(d, f'with torch.autocast("cpu", {dtype}):', dtype)


def _region(d: Draft, header: str, lower: torch.dtype | None, **other: str) -> None:
    """Eager autocast forgets its casts where the outermost region ends."""
    if d.setting.own and not d.place.region and not d.place.body:
        other["oracle"] = header.removesuffix(":") + ", lowered.region():"
    with d.block(header, replace(d.place, region=True, lower=lower), **other):
        d.statements(3)
