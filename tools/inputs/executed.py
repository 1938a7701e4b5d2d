"""Run an ``fx_graph_runnable.py`` that the user trusts, to get what its text alone does not contain."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Tracer
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxamp.errors import ListingError
from fxamp.tools.inputs.model_file import as_module, guarded
from fxamp.tools.inputs.prepare import ProgramGraph


def run_runnable(file: str, notice: Callable[[str], None]) -> ProgramGraph:
    """Run the file, and return the graph of the runnable with its inputs; ``notice`` gets a message first.

    The graph itself is not run, and its inputs are FakeTensors. Symbolic sizes have the numbers of the program's run.
    Raises ListingError with the line where the file raised, or if it does not define what torch's repro writer does.
    """
    notice(f"running {file}, because --trust was given")
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True, static_shapes=True)
    source = compile(Path(file).read_text(encoding="utf-8"), file, "exec")
    inputs = _Inputs(mode)
    with as_module(file) as module, mode:
        guarded(file, lambda: exec(source, vars(module)))
        mod, load_args = (vars(module).get(name) for name in ("mod", "load_args"))
        if not isinstance(mod, torch.nn.Module) or not callable(load_args):
            raise ListingError(f"{file}: it defines no mod and load_args, as torch's fx_graph_runnable.py does")
        guarded(file, lambda: load_args(inputs))
        graph = GraphModule(mod, guarded(file, lambda: Tracer().trace(mod)))
    return ProgramGraph("graph_0", graph, inputs.args, min(inputs.devices - {"cpu", "meta"}, default="cpu"))


class _Inputs:
    """Records the inputs that ``load_args`` describes, with the methods of torch's InputReader but without memory."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self.args: list[Any] = []
        self.devices: set[str] = set()

    def storage(self, storage_hash: str | None, nbytes: int, *, device: Any = None, dtype_hint: Any = None) -> None:
        self.devices.add(torch.device(device or "cpu").type)

    def tensor(
        self,
        storage: None,
        shape: Sequence[int],
        stride: Sequence[int] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        requires_grad: bool = False,
        **_: Any,
    ) -> None:
        with self._mode:
            fresh = torch.empty(shape, dtype=dtype, device="cpu")
            fresh = fresh if stride is None else torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
        self.args.append(fresh.requires_grad_(requires_grad))

    def symint(self, val: Any, *, expr: str | None = None) -> None:
        self.args.append(val)

    def _nothing(self, *_: Any) -> None:
        self.args.append(None)

    const = unsupported = opaque = generator = _nothing
