"""The kernel that runs before a generated step: it computes each parameter's 0-dim values, and writes its counters.

One program serves one parameter. Values that the step's own kernel reads go to cells of 8 bytes, as many for each
parameter as :func:`~fxamp.optim.kernels.scalar_nodes.prepared_nodes` returns. So float64 arithmetic, for which most
GPUs have few units, runs once instead of in each thread of the step.
"""

from torch.fx import GraphModule

from fxamp.kernels.gradient_triton import indented
from fxamp.optim.kernels.scalar_nodes import counters, is_flat, prepared_nodes
from fxamp.optim.kernels.step_triton import Aligned, StepInputs, Writer

NAME = "step_scalars"

HEAD = '''\
"""The values that an optimizer's step computes once for each parameter. Written by fxamp.optim.kernels.

Not to be edited.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment={unaligned})
def {name}({parameters}):
    which = tl.program_id(0)
    row = table + {row} * which
    own = scalars + {cells} * which
'''


def scalars_parameters(inputs: StepInputs) -> dict[str, str]:
    """Return the kernel's parameters, in order, each with its Triton type."""
    return {"table": "*i64", "scalars": "*i64", **dict.fromkeys(inputs.shared.values(), "*fp32")}


def scalars_text(gm: GraphModule, inputs: StepInputs) -> str | None:
    """Return the Python module that defines the kernel :data:`NAME`; None if the step needs none.

    Args:
        gm, inputs: as for :func:`~fxamp.optim.kernels.step_triton.step_text`.

    Raises:
        NotGeneratedError: an op or a dtype is not in the tables.
    """
    prepared = prepared_nodes(gm)
    if not prepared and not counters(gm):
        return None
    names = list(scalars_parameters(inputs))
    head = HEAD.format(
        unaligned=names[2:], name=NAME, parameters=", ".join(names), row=len(inputs.cells) + 1, cells=len(prepared)
    )
    writer = Writer(inputs, Aligned.NONE, block=1)
    lines = [line for node in gm.graph.nodes if not is_flat(node) for line in writer.lines(node, "")]
    lines += map(writer.prepare, prepared, range(len(prepared)))
    lines += [line for node in counters(gm) for line in writer.store(node, "")]
    return head + "\n".join(indented(lines, 4)) + "\n"
