"""fold-unscale: let an optimizer's step graph read scaled gradients, and unscale them as it reads them.

1. A graph with gradients, used or not, gets new last inputs, 0-dim float32: ``inv_scale`` (1 / scale) if ``scaled``,
   ``clip_coefficient`` if ``clipped``.
2. All ops read a gradient times the first, then times the second. Each time it is multiplied in float32 at least
   and rounded to its dtype, as ``GradScaler.unscale_`` and ``clip_grad_norm_`` do one after the other.

Gradients are the inputs marked ``node.meta[GRADIENT]``. Both factors are fused into the step's first read of the
gradient, so they cause no extra memory traffic; in-place passes over the gradients move 8 bytes per float32 each.
"""

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from fxamp.graph import GraphWriter, first_computation
from fxamp.passes.base import Context, Pass, Result, broken_by

#: Key of ``node.meta``, set on the inputs that are gradients.
GRADIENT = "fxamp_gradient"

#: Key of ``node.meta``, set on an input whose uses were rewritten.
FOLDED = "fxamp_folded"

#: Names of the new inputs.
INVERSE, COEFFICIENT = "inv_scale", "clip_coefficient"


aten = torch.ops.aten


@dataclass(frozen=True)
class FoldUnscale(Pass[Context]):
    """Requires marked gradients; ensures rule 2 for each. ``scaled``, ``clipped``: which factors there are."""

    scaled: bool = True
    clipped: bool = False
    name = "fold-unscale"

    def run(self, gm: GraphModule, context: Context) -> Result:
        inputs = gm.graph.find_nodes(op="placeholder")
        marked = [node for node in inputs if GRADIENT in node.meta]
        names = [name for name, asked in ((INVERSE, self.scaled), (COEFFICIENT, self.clipped)) if asked]
        if not (names and marked) or any(node.target in names for node in inputs):
            return Result(0)
        bare = [node for node in marked if node.users]
        writer, device = GraphWriter(gm.graph, context.mode), marked[0].meta["val"].device
        factors = [writer.input(name, dtype=torch.float32, device=device) for name in names]
        first = first_computation(gm.graph)
        for gradient in bare:
            users = list(gradient.users)
            with gm.graph.inserting_before(first):
                true = gradient
                for factor in factors:
                    true = writer.times(true, factor)
            for user in users:
                written = user.target is aten.copy_.default and user.args[0] is gradient
                user.replace_input_with(gradient, true)
                if written:
                    user.update_arg(0, gradient)
            gradient.meta[FOLDED] = True
        return Result(len(bare))

    def ensures(self, gm: GraphModule, context: Context) -> str | None:
        bare = (node for node in gradients(gm) if FOLDED not in node.meta)
        return broken_by("read as they are", bare) if self.scaled or self.clipped else None


def gradients(gm: GraphModule) -> list[Node]:
    """Return the inputs that are gradients and are used."""
    return [node for node in gm.graph.find_nodes(op="placeholder") if GRADIENT in node.meta and node.users]
