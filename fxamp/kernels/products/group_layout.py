"""Rows in groups, as in :func:`torch.nn.functional.grouped_mm`: the position of each row once groups are padded.

``offsets``: int32 ``[groups]``, in ascending order, the ends of the groups of ``[rows, ...]``. Rows beyond the last end
are in no group. The host does not read the sizes, so a padded tensor has the largest size that any groups could need.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Padded:
    """Rows whose groups are padded to a multiple.

    ``sources``: ``[padded rows]``, the row at each position, -1 for padding. ``ends``: int32 ``[groups]``, the ends of
    the padded groups.
    """

    sources: Tensor
    ends: Tensor

    def gather(self, rows: Tensor) -> Tensor:
        """Return ``rows``, ``[rows, columns]``, padded with zeros: ``[padded rows, columns]``."""
        return torch.where((self.sources >= 0).unsqueeze(1), rows.index_select(0, self.sources.clamp(min=0)), 0)


def padded(offsets: Tensor, rows: int, multiple: int) -> Padded:
    """Return the layout of ``rows`` rows whose groups are padded to multiples of ``multiple``, as torchao pads them."""
    starts = starts_of(offsets)
    sizes = offsets - starts
    ends = ((sizes + (multiple - 1)) // multiple * multiple).cumsum(0)
    room = (rows + offsets.shape[0] * multiple + multiple - 1) // multiple * multiple
    place = torch.arange(room, device=offsets.device).unsqueeze(1) - starts_of(ends)
    row = torch.where((place >= 0) & (place < sizes), place + starts + 1, 0).sum(1)
    return Padded(row - 1, ends.int())


def starts_of(offsets: Tensor) -> Tensor:
    """``[groups]``: where each group begins."""
    return functional.pad(offsets, (1, -1))


def group_of(rows: int, offsets: Tensor, step: int = 1) -> Tensor:
    """``[rows / step]``: the group of rows 0, ``step``, ...; the number of groups for rows in no group."""
    return (torch.arange(0, rows, step, device=offsets.device).unsqueeze(1) >= offsets).sum(1)


def tile_order(ends: Tensor, down: int, across: int) -> Tensor:
    """Return the order in which GPUs read tiles of scales, ``[down, across]``, whose groups end at columns ``ends``.

    GPUs read one group after another, and the tiles of each group row by row. The result is ``[down * across]``: the
    index of each tile, counted row by row over all groups.
    """
    starts = starts_of(ends)
    place = torch.arange(down * across, device=ends.device).unsqueeze(1) - down * starts
    widths = ends - starts
    own = (place >= 0) & (place < down * widths)
    columns = widths.clamp(min=1)
    return torch.where(own, place // columns * across + starts + place % columns, 0).sum(1)
