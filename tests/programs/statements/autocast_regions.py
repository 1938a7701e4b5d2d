"""Autocast regions of the program's own: nested, in a row, off, of either dtype."""

from dataclasses import replace

import torch
from programs.draft import Draft, Unfit
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


@statement()
def region_without_cache(d: Draft) -> None:
    """Each use of a weight has a cast of its own, and regions inside follow."""
    dtype = d.pick(_HALVES)
    header = f'with torch.autocast("cpu", {dtype}, cache_enabled=False):'
    with d.block(header, replace(d.place, region=True, lower=dtype, cached=False)):
        d.statements(3)


@statement()
def region_of_another_device(d: Draft) -> None:
    """It says nothing here."""
    with d.block('with torch.autocast("xpu", torch.bfloat16):', d.place):
        d.statements(2)


@statement()
def region_as_decorator(d: Draft) -> None:
    """A function that autocast wraps, and calls."""
    if d.setting.own or d.place.body:
        raise Unfit
    dtype = d.pick((None, *_HALVES))
    x, body, own = d.value(), d.fresh("body"), d.fresh("a")
    with d.whole(), d.function(body, {own: x}, replace(d.place, region=True, lower=dtype)):
        d.statements(2)
        d.give(d.value())
    d.let(f'torch.autocast("cpu", {dtype}, enabled={dtype is not None})({body})({x})')


def _region(d: Draft, header: str, lower: torch.dtype | None, **other: str) -> None:
    """Eager autocast forgets its casts where the outermost region ends."""
    if d.setting.own and not d.place.region and not d.place.body:
        other["oracle"] = header.removesuffix(":") + ", lowered.region():"
    with d.block(header, replace(d.place, region=True, lower=lower), **other):
        d.statements(3)
