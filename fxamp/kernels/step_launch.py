"""Launch a generated step: one launch for all parameters whose steps have the same source."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxamp.kernels.codes import SCALES
from fxamp.kernels.launch import OPTIONS
from fxamp.kernels.plan import ALIGNMENT, block_map, block_size
from fxamp.kernels.step_source import NAME, StepInputs, step_text
from fxamp.kernels.store import load_function


@dataclass(frozen=True, eq=False)
class _Tables:
    """What a launch reads besides the step's tensors; all on the device."""

    key: Any
    table: Tensor
    blocks: Tensor
    arrivals: Tensor


class StepKernel:
    """The kernel of one graph; see :func:`~fxamp.kernels.step_source.step_text`.

    Args:
        gm, inputs: as there.
        interpret: run in Triton's interpreter.

    Raises:
        NotGeneratedError: the graph contains something that no kernel can be generated for.
    """

    def __init__(self, gm: GraphModule, inputs: StepInputs, interpret: bool = False) -> None:
        self._interpret = interpret
        block = block_size(torch.float32, 64 if torch.version.hip else 32)
        self.texts = {aligned: step_text(gm, inputs, aligned, block) for aligned in (True, False)}
        values = [(node.meta["val"], name) for node, name in inputs.cells.items()]
        # Scales, one for 256 elements, are not read 16 bytes at a time.
        self._flat = [v.dim() > 0 and v.dtype is not SCALES and name != "numbers" for v, name in values]
        self._signs = any("arrivals" in line for line in self.texts[True].splitlines())
        self._tables: dict[bool, _Tables] = {}

    def __call__(self, rows: Sequence[Sequence[Tensor]], shared: Sequence[Tensor]) -> None:
        """Step.

        Args:
            rows: for each parameter one tensor per cell; non-0-dim tensors are dense, with one order of elements.
            shared: 0-dim float32 tensors, in the order of the inputs.
        """
        flat = self._flat
        addresses = [[tensor.data_ptr() for tensor in row] for row in rows]
        aligned = [all(a % ALIGNMENT == 0 for a, f in zip(row, flat, strict=True) if f) for row in addresses]
        for wanted in (True, False):
            chosen = [at for at, each in enumerate(aligned) if each is wanted]
            if chosen:
                self._launch([rows[at] for at in chosen], [addresses[at] for at in chosen], shared, wanted)

    def _launch(
        self, rows: Sequence[Sequence[Tensor]], addresses: list[list[int]], shared: Sequence[Tensor], aligned: bool
    ) -> None:
        device = rows[0][0].device
        tables = self._table(rows, addresses, aligned, device)
        signing = [tables.arrivals] if self._signs else []
        function = load_function(NAME, self.texts[aligned])
        if self._interpret:
            from fxamp.kernels.interpreter import Interpreted

            function = Interpreted(function)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            function[(len(tables.blocks) // 2,)](tables.table, tables.blocks, *signing, *shared, **OPTIONS)

    def _table(
        self, rows: Sequence[Sequence[Tensor]], addresses: list[list[int]], aligned: bool, device: torch.device
    ) -> _Tables:
        """Return the last launch's tables if no tensor has moved; not under capture, which has its own memory pool.

        A parameter without elements, as a shard may be, has a program too: it counts the step.
        """
        on_gpu = device.type == "cuda"
        capturing = on_gpu and torch.cuda.is_current_stream_capturing()
        numels = [row[self._flat.index(True)].numel() for row in rows]
        key = (addresses, numels, device, torch.cuda.current_stream(device).cuda_stream if on_gpu else 0)
        known = self._tables.get(aligned)
        if known is not None and known.key == key and not capturing:
            return known
        cells = [cell for row, numel in zip(addresses, numels, strict=True) for cell in (*row, numel)]
        parts = [
            torch.tensor(cells, dtype=torch.int64, device="cpu"),
            block_map([max(numel, 1) for numel in numels]).flatten(),
        ]
        host = torch.empty(sum(map(len, parts)), dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        sent = torch.cat(parts, out=host).to(device, non_blocking=True)
        table, blocks = torch.split(sent, [len(part) for part in parts])
        arrivals = torch.zeros(len(rows), dtype=torch.int32, device=device)
        tables = _Tables(key, table, blocks, arrivals)
        if not capturing:
            self._tables[aligned] = tables
        return tables
