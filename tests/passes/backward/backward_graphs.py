"""Backward graphs of tiny programs, as AOTAutograd hands them to a compiler."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import nop
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fxamp.pipeline.participant import boxed


def backward_graph(program: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    """The partitioned backward graph of ``program``."""
    graphs: list[GraphModule] = []

    def backward(gm: GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return boxed(gm.forward)

    torch._dynamo.reset()
    compiler = aot_autograd(fw_compiler=nop, bw_compiler=backward)
    results = pytree.tree_leaves(torch.compile(program, backend=compiler, dynamic=False)(*inputs))
    # The backward graph is compiled when it is first needed.
    torch.autograd.backward(results, [torch.ones_like(result) for result in results])
    (gm,) = graphs
    return gm


def mode_of(gm: GraphModule) -> FakeTensorMode:
    """The mode of a graph's values."""
    return next(iter(gm.graph.nodes)).meta["val"].fake_mode
