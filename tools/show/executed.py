"""``fx_graph_runnable.py`` that is run, because the user trusts it: for what its text alone does not tell."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.debug_utils import InputReader
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Tracer
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxamp.errors import ListingError
from fxamp.tools.show.collect import on_cpu
from fxamp.tools.show.model_file import as_module, guarded
from fxamp.tools.show.prepare import Prepared


def run_runnable(file: str, notice: Callable[[str], None]) -> Prepared:
    """The graph of a runnable and its inputs, by running the file; ``notice`` is told before.

    The graph itself is not run: its inputs are FakeTensors. Raises ListingError, with the line where the file raised,
    or if it does not define what torch's repro writer defines.
    """
    notice(f"running {file}, because --trust was given")
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True, static_shapes=True)
    with as_module(file) as module, mode:
        source = compile(Path(file).read_text(encoding="utf-8"), file, "exec")
        guarded(file, lambda: exec(source, vars(module)))
        mod, load_args = (vars(module).get(name) for name in ("mod", "load_args"))
        if not isinstance(mod, torch.nn.Module) or not callable(load_args):
            raise ListingError(f"{file}: it defines no mod and load_args, as torch's fx_graph_runnable.py does")
        reader = InputReader()
        guarded(file, lambda: load_args(reader))
    given: list[Any] = reader.args
    kinds = {value.device.type for value in given if isinstance(value, Tensor)}
    return Prepared(
        "graph_0",
        GraphModule(mod, Tracer().trace(mod)),
        [on_cpu(value, mode) for value in given],
        min(kinds - {"cpu", "meta"}, default="cpu"),
    )
