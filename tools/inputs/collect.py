"""Collect all graphs that torch.compile creates for one call of a model, on FakeTensors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from fxamp.errors import ListingError
from fxamp.reports.break_reasons import why_ended
from fxamp.tools.common.restoration import restored, tensors_beside_modules
from fxamp.tools.common.silence import one_line
from fxamp.tools.inputs.fake_program import fake_program
from fxamp.tools.inputs.measurement import calling, device_of, state_of
from fxamp.tools.inputs.model_file import Program, place
from fxamp.tools.inputs.prepare import ProgramGraph
from fxamp.torch_private import dropped_sizes
from fxamp.torch_private.parts.dynamo import TorchRuntimeError

#: Errors that real tensors would cause too: the inputs do not match the model.
_MISFITS = (TorchRuntimeError, TypeError)


def collect(program: Program, file: str, notice: Callable[[str], None]) -> list[ProgramGraph]:
    """Return the graphs of one call, in Dynamo's order; nothing is computed on real tensors.

    If the code between the graphs needs the values of tensors, the model is run on its real inputs instead; ``notice``
    gets a message. Raises ListingError if the inputs do not match the model, or if there is no graph.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True, static_shapes=True)
    device = _device(program)
    try:
        beside = restored(tensors_beside_modules(program.model))
        with beside, fake_program(program, mode, "cpu") as fake, mode, dropped_sizes(mode.shape_env):
            return _compiled(fake, device)
    except _MISFITS as error:
        raise _misfit(file, error) from error
    except Exception as error:
        if device == "meta":
            raise _misfit(file, error, " (parameters on meta have no values to run it on)") from error
        notice(f"running the model on its real inputs, because FakeTensors are not enough: {one_line(error)}")
    try:
        with restored(program.model, (program.args, dict(program.kwargs))):
            return _compiled(program, device)
    except Exception as error:
        raise _misfit(file, error) from error


def _misfit(file: str, error: Exception, more: str = "") -> ListingError:
    stack = [frame for frame in getattr(error, "real_stack", None) or () if frame.filename == file]
    where = f"{file}:{stack[-1].lineno}" if stack else place(file, error)
    return ListingError(f"{where}: calling model on inputs failed{more}: {one_line(error)}")


def _compiled(program: Program, device: str) -> list[ProgramGraph]:
    graphs: list[ProgramGraph] = []

    def take(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        name = f"graph_{len(graphs)}"
        graphs.append(ProgramGraph(name, _copy(gm), list(inputs), "" if device == "meta" else device, why_ended(gm)))
        return gm.forward

    mod = program.model
    compiled = calling(mod) if type(mod).__module__.startswith("torch.nn.") else mod
    torch._dynamo.reset()
    torch.compile(compiled, backend=take, dynamic=False)(*program.args, **program.kwargs)
    torch._dynamo.reset()
    return graphs


def _copy(gm: GraphModule) -> GraphModule:
    """Return a copy of the graph with its values, which Dynamo removes when it is done."""
    graph = Graph()
    output: Any = graph.graph_copy(gm.graph, {})
    graph.output(output)
    return GraphModule(gm, graph)


def _device(program: Program) -> str:
    """Return the device type of the program's tensors: an accelerator if there is one, "meta" for meta parameters."""
    leaves = pytree.tree_leaves((program.args, dict(program.kwargs)))
    return device_of([*state_of(program.model), *(value for value in leaves if isinstance(value, Tensor))])
