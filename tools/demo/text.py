"""The demo's text: the source of Python's standard library, as bytes. Every machine with Python has it."""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from fxamp.errors import FxampError

#: A byte is a token.
VOCABULARY = 256


@dataclass(frozen=True)
class Text:
    """Bytes as uint8 tensors of one dimension: ``train``, and ``held_out``, which no step of training reads."""

    train: torch.Tensor
    held_out: torch.Tensor
    folder: Path
    files: int

    def batch(self, size: int, length: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """``size`` random passages: inputs, and targets (the same, one byte on); both int64[size, length]."""
        starts = torch.randint(len(self.train) - length, (size,), generator=generator)
        return _passages(self.train, starts, length)

    def examination(self, size: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``size`` passages evenly spread over the held-out text, always the same; shapes as for :meth:`batch`."""
        starts = torch.linspace(0, len(self.held_out) - length - 1, size).long()
        return _passages(self.held_out, starts, length)


def _passages(text: torch.Tensor, starts: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    passages = text[starts[:, None] + torch.arange(length + 1)].long()
    return passages[:, :-1].contiguous(), passages[:, 1:].contiguous()


def standard_library(folder: Path | None = None, every: int = 20) -> Text:
    """Read the modules directly in ``folder`` (Python's standard library by default), in alphabetical order.

    Each ``every``-th file is held out. Raises FxampError if there is no source there, as in a zipped installation.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if len(files) < every:
        raise FxampError(
            f"{folder} holds {len(files)} Python source files; the demo trains on at least {every} of them"
        )
    held_out = files[every - 1 :: every]
    return Text(_join([file for file in files if file not in held_out]), _join(held_out), folder, len(files))


def _join(files: list[Path]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
