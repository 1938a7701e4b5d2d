"""Launch a generated step for all parameters whose steps share a source: one launch, or two with 0-dim values."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule

from fxamp.kernels.launch_plan import ALIGNMENT, block_map
from fxamp.kernels.store import load_function
from fxamp.optim.kernels.launch_size import SCALARS_OPTIONS, STEP_OPTIONS, step_block
from fxamp.optim.kernels.scalar_nodes import is_flat, prepared_nodes
from fxamp.optim.kernels.scalars import NAME as SCALARS
from fxamp.optim.kernels.scalars import scalars_text
from fxamp.optim.kernels.step_triton import GRADIENT, NAME, Aligned, StepInputs, step_text
from fxamp.passes.step.pack_state import is_scales
from fxamp.torch_devices import moved, on_device

MOST_TABLES = 16


@dataclass(frozen=True)
class StepTarget:
    """The parameters that a kernel steps: their ``numels``, their one device, and whether Triton's interpreter runs."""

    numels: tuple[int, ...]
    device: torch.device
    interpret: bool = False


@dataclass(eq=False)
class _Tables:
    """The inputs of a launch besides the step's tensors, for parameters with the same alignment.

    Attributes:
        columns: the addresses that they were made for, cell by cell.
        stream: the CUDA stream that they were sent on.
        launches: for each launch, which addresses of its parameters are aligned, and three int64 tensors on the device:
            the table of addresses, the table of blocks, and the cells for 0-dim values. These tensors are always
            aligned, because Triton would compile the kernel again for unaligned ones.
        origin: the caller's identification of the columns; None if it has none.
    """

    columns: list[list[int]]
    stream: int
    launches: tuple[tuple[Aligned, Tensor, Tensor, Tensor], ...]
    origin: object = None


class StepKernel:
    """The kernel of one graph; see :func:`~fxamp.optim.kernels.step_triton.step_text`.

    While no tensor moves, a step only reads addresses, compares them and launches. A gradient that moves changes one
    column of the table; the blocks depend on sizes alone.

    Args:
        gm, inputs: as for ``step_text``.
        target: the parameters that it steps.

    Raises:
        NotGeneratedError: the graph contains something that no kernel can be generated for.
    """

    def __init__(self, gm: GraphModule, inputs: StepInputs, target: StepTarget) -> None:
        self._target = target
        self.texts = {aligned: step_text(gm, inputs, aligned, step_block()) for aligned in Aligned}
        self.scalars = scalars_text(gm, inputs)
        self._cells = len(prepared_nodes(gm))
        # Scales, one for 256 elements, are not read 16 bytes at a time.
        self._flat = np.array([is_flat(node) and not is_scales(node) for node in inputs.cells])
        self._gradient = np.array([name == GRADIENT for name in inputs.cells.values()])
        self._blocks: dict[tuple[int, bytes], tuple[Tensor, Tensor]] = {}
        self._tables: _Tables | None = None

    @property
    def source(self) -> str:
        """The generated code for aligned addresses: of the step, then of the 0-dim values that it needs."""
        text = self.texts[Aligned.ALL]
        return text if self.scalars is None else f"{text}\n\n{self.scalars}"

    def __call__(self, columns: list[list[int]], shared: Sequence[Tensor], origin: object = None) -> None:
        """Step.

        Args:
            columns: for each cell, the address of its tensor of every parameter; tensors with dimensions are dense, in
                the parameter's memory order. The tensors must live until the step has been launched.
            shared: 0-dim float32 tensors, in the order of the inputs.
            origin: identifies these columns for :meth:`again`; None if nothing does.
        """
        with on_device(self._target.device):
            tables = self._prepared(columns)
            tables.origin = origin
            self._launch(tables, shared)

    def again(self, origin: object, shared: Sequence[Tensor]) -> bool:
        """Repeat the last step and return True if origin and stream are the same; never during a CUDA capture."""
        tables = self._tables
        with on_device(self._target.device):
            if (
                tables is None
                or tables.origin is None
                or tables.origin != origin
                or (tables.stream, False) != self._stream()
            ):
                return False
            self._launch(tables, shared)
            return True

    def _launch(self, tables: _Tables, shared: Sequence[Tensor]) -> None:
        for aligned, table, blocks, scalars in tables.launches:
            if self.scalars is not None:
                rows = len(table) // (len(tables.columns) + 1)
                function = load_function(SCALARS, self.scalars, self._target.interpret)
                function[(rows,)](table, scalars, *shared, **SCALARS_OPTIONS)
            prepared = [scalars] if self._cells else []
            function = load_function(NAME, self.texts[aligned], self._target.interpret)
            function[(len(blocks) // 2,)](table, blocks, *prepared, *shared, **STEP_OPTIONS)

    def _stream(self) -> tuple[int, bool]:
        """Return the current stream, and whether it is capturing, because a capture has its own memory pool."""
        if self._target.device.type != "cuda":
            return 0, False
        return torch.cuda.current_stream().cuda_stream, torch.cuda.is_current_stream_capturing()

    def _prepared(self, columns: list[list[int]]) -> _Tables:
        """Return the last launch's tables if no tensor has moved; not under capture."""
        stream, capturing = self._stream()
        last = self._tables
        if last is not None and last.columns == columns and last.stream == stream and not capturing:
            return last
        addresses = np.array(columns, dtype=np.int64).T
        rows = np.column_stack([addresses, self._target.numels])
        launches = []
        for aligned, chosen in self._by_alignment(addresses):
            if chosen.any():
                table = _uploaded(torch.from_numpy(rows[chosen].ravel()), self._target.device)
                launches.append((aligned, table, *self._blocks_of(chosen, stream, capturing)))
        tables = _Tables(columns, stream, tuple(launches))
        if not capturing:
            self._tables = tables
        return tables

    def _by_alignment(self, addresses: "np.ndarray[Any, Any]") -> Iterator[tuple[Aligned, "np.ndarray[Any, Any]"]]:
        """Yield the parameters by alignment; ``addresses``: a row for each parameter, a column for each cell."""
        fits = (addresses % ALIGNMENT == 0) | ~self._flat
        every, others = fits.all(axis=1), (fits | self._gradient).all(axis=1)
        yield Aligned.ALL, every
        yield Aligned.BUT_GRADIENT, others & ~every
        yield Aligned.NONE, ~others

    def _blocks_of(self, chosen: "np.ndarray[Any, Any]", stream: int, capturing: bool) -> tuple[Tensor, Tensor]:
        """Return the table of blocks and the cells of one launch, of the ``chosen`` parameters.

        A parameter without elements, as a shard may be, has a program too.
        """
        key, device = (stream, chosen.tobytes()), self._target.device
        known = None if capturing else self._blocks.get(key)
        if known is None:
            cells = max(1, int(chosen.sum()) * self._cells)
            blocks = block_map(np.maximum(self._target.numels, 1)[chosen].tolist()).flatten()
            known = _uploaded(blocks, device), torch.empty(cells, dtype=torch.int64, device=device)
            if not capturing:
                if len(self._blocks) == MOST_TABLES:
                    self._blocks.clear()
                self._blocks[key] = known
        return known


def _uploaded(host: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting, from new pinned memory, which torch holds until the copy has run."""
    return moved(host.pin_memory(), device) if device.type == "cuda" else host
