"""Dump every stage of a compiled graph as text: to a folder, to torch's structured trace, and to the log.

The folder gets ``graph_0_captured.py``, ``graph_0_cast.py`` and so on, which fxamp-show reads; the same program gives
the same files. tlparse shows the stages as artifacts ``fxamp_cast``, ...; ``TORCH_LOGS=+fxamp`` logs them.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Lock

import torch.distributed

from fxamp.errors import OptionError
from fxamp.graph_text import Listing
from fxamp.graph_text.comments import PREFIX
from fxamp.graph_text.write import write_listing
from fxamp.torch_private.parts.fx import trace_structured_artifact

log = logging.getLogger(__name__)

#: The number of graphs that this process has dumped so far, by folder.
_numbers: dict[Path, int] = {}
_numbering = Lock()


@dataclass
class Stages:
    """Receives the stages of one graph; a stage's text is only created if it is needed.

    ``folder`` is the folder for the files, None for no files.
    """

    folder: Path | None = None
    number: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.folder is None:
            return
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.folder = self.folder / f"rank_{torch.distributed.get_rank()}"
        with _numbering:
            self.number = _numbers.get(self.folder, 0)
            _numbers[self.folder] = self.number + 1
            if self.number == 0:
                _prepare(self.folder)

    @property
    def written(self) -> bool:
        """Whether files are written, so that every stage is needed."""
        return self.folder is not None

    def graph(self, stage: str, listing: Callable[[], Listing]) -> None:
        """Record the graph after ``stage``."""
        self.text(stage, lambda: write_listing(listing(), self.number if self.written else None))

    def text(self, stage: str, make: Callable[[], str]) -> None:
        """Record a stage that is text already."""
        if self.folder is not None:
            (self.folder / f"graph_{self.number}_{stage}.py").write_text(make(), encoding="utf-8")
        trace_structured_artifact(f"fxamp_{stage}", "string", make)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("graph after stage %s:\n%s", stage, make())


def stages_by_environment() -> Stages:
    """Return the stages for FXAMP_DUMP, for code that is compiled outside the backend: an optimizer's step."""
    folder = os.environ.get("FXAMP_DUMP")
    return Stages(check_folder(folder) if folder else None)


def check_folder(value: str) -> Path:
    """Return ``value`` as a folder to dump to; raises OptionError if it is a file. Creates nothing yet."""
    folder = Path(value).expanduser().absolute()
    blocked = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), None)
    if blocked is not None:
        raise OptionError(f"option 'dump' is {value!r}, but {blocked} is a file; accepted: a folder, existing or new")
    return folder


def _prepare(folder: Path) -> None:
    """Create the folder, and remove the dumps of an earlier run, because this run may not overwrite all of them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OptionError(
            f"option 'dump' is {str(folder)!r}, which cannot be written ({error.strerror}); accepted: a folder, "
            "existing or new, in which you may write"
        ) from error
    for path in folder.glob("graph_*_*.py"):
        with path.open(encoding="utf-8") as file:
            ours = file.readline().startswith(PREFIX)
        if ours:
            path.unlink()
