"""scale-backward: multiply the tangents of a backward graph by the loss scale; return unscaled, checked gradients.

1. The graph gets a new last input: the scale, 0-dim float32, passed when the backward runs.
2. Every tangent is multiplied by the scale, in float32 at least, and rounded to the tangent's dtype. From here to rule
   4 all gradients are scaled, so float16 does not underflow. A float16 tangent arrives scaled.
3. The inverse is computed in float64 and rounded once, as torch.amp.GradScaler does; in float32 on mps.
4. Every gradient is multiplied by the inverse, in float32 at least, and rounded to its dtype. A float16 gradient stays
   scaled.
5. A new last output holds a flag for each gradient: nonzero if it holds an inf or NaN. ``output.meta[FLAGGED]`` lists
   the positions of each flag's gradients: one, but see "shared". Outputs that are not gradients (random states, tokens)
   do not change.
6. If requested, one more output is the sum of the squares of all unscaled gradients, 0-dim float32, without float16
   ones. It is computed together with the check, so clipping by the norm needs no extra pass over the gradients.

Tangents and gradients are identified by AOTAutograd's descriptors, ``node.meta["desc"]``. The pass uses only ops that
Inductor can lower after the partition (``aten.isfinite`` is not one of them).

There are three ways to check. ``"ops"`` writes plain ops, which Inductor fuses into the op that computes the gradient:
nothing is read twice, but each gradient needs one or two reductions. ``"shared"`` does the same, but small gradients of
one shape share a flag; if it is set, the caller reads them to find those that overflowed. ``"kernel"`` passes the
gradients of one device and dtype to one ``fxamp::check_unscale``, or to several if they have more than 2^26 elements,
so that their 16-bit values need not all wait for the last one. If the last op of a gradient is a widening cast (a
weight's float16 gradient), the kernel reads the value before the cast. A large float32 gradient from an elementwise op,
such as the sum of two gradients, gets plain ops even then. For n parameters in k tensors, float16 products, and float32
gradients:

    "ops"       6n bytes if Inductor fuses cast, product and check        at most 2k launches
    "kernel"    6n bytes if a cast is last, else 8n                       1 launch for a pair of dtypes, or several

A launch costs microseconds on a GPU and nothing on a CPU, so CUDA uses "kernel" and other devices "ops". On a CPU the
host can read flags and gradients without waiting, but each flag costs it a view: it uses "shared".
"""

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from fxamp.graph import GraphWriter, graph_output, returned
from fxamp.passes.base import Context, Result, TracedPass
from fxamp.passes.shared.unscale_and_check import UnscaleWriter, in_float16
from fxamp.passes.shared.widening import erase_unused

#: Key of the output node's ``meta``: for each flag, the positions of the outputs that it is for.
FLAGGED = "fxamp_flagged"

#: Name of the new input.
SCALE = "loss_scale"

CHECKS = ("ops", "shared", "kernel")


@dataclass(frozen=True)
class ScaleBackward(TracedPass[Context]):
    """Requires AOTAutograd's descriptors of inputs and outputs; ensures rules 1 and 5 for every gradient.

    ``check``: one of :data:`CHECKS`; ``norm``: whether to apply rule 6. A graph without gradients does not change.
    """

    check: str = "ops"
    norm: bool = False
    name = "scale-backward"

    def requires(self, gm: GraphModule, context: Context) -> str | None:
        described = graph_output(gm.graph).meta.get("desc")
        if FLAGGED in graph_output(gm.graph).meta or not gradients(gm):
            return None if described is not None else "the outputs carry no descriptors"
        if len(described or ()) != len(returned(gm.graph)):
            return "the outputs carry no descriptors"
        return None if tangents(gm) else "there are gradients, but no tangents that they are made of"

    def run(self, gm: GraphModule, context: Context) -> Result:
        places = gradients(gm)
        if FLAGGED in graph_output(gm.graph).meta or not places:
            return Result(0)
        entering = tangents(gm)
        graph_writer = GraphWriter(gm.graph, context.mode)
        # Rule 1; the scale is on the first tangent's device.
        scale = graph_writer.input(SCALE, dtype=torch.float32, device=entering[0].meta["val"].device)
        writer = UnscaleWriter(graph_writer, scale, self.check, self.norm)
        for tangent in entering:
            if not in_float16(tangent):
                writer.scale(tangent)
        output = graph_output(gm.graph)
        before, results = returned(gm.graph), list(returned(gm.graph))
        with gm.graph.inserting_before(output):
            unscaled = writer.unscale([results[at] for at in places])
        for at, gradient in zip(places, unscaled.gradients, strict=True):
            results[at] = gradient
        added = [unscaled.flags] if unscaled.square is None else [unscaled.flags, unscaled.square]
        output.args = ((*results, *added),)
        output.meta[FLAGGED] = tuple(tuple(places[at] for at in every) for every in unscaled.covered)
        output.meta["desc"] = [*output.meta["desc"], *[None] * len(added)]
        for at in places:
            erase_unused(before[at])
        return Result(len(entering) + len(places), {"tangents": len(entering), "gradients": len(places)})

    def ensures(self, gm: GraphModule, context: Context) -> str | None:
        output = graph_output(gm.graph)
        flagged, places = output.meta.get(FLAGGED, ()), tuple(gradients(gm))
        if tuple(sorted(at for every in flagged for at in every)) != places:
            return f"gradients at {places}, but flags for {flagged}"
        return None if not places or _inputs(gm)[-1].name == SCALE else "the scale is not the last input"


def tangents(gm: GraphModule) -> list[Node]:
    """Return the inputs that are gradients of the forward's results, and differentiable."""
    return [node for node in _inputs(gm) if _described(node.meta.get("desc"), "is_tangent") and _differentiable(node)]


def gradients(gm: GraphModule) -> list[int]:
    """Return the positions of the outputs that are gradients of the forward's inputs."""
    pairs = zip(returned(gm.graph), graph_output(gm.graph).meta.get("desc") or (), strict=False)
    return [at for at, (node, desc) in enumerate(pairs) if _described(desc, "is_grad") and _differentiable(node)]


def _inputs(gm: GraphModule) -> list[Node]:
    return list(gm.graph.find_nodes(op="placeholder"))


def _described(descriptor: object, question: str) -> bool:
    return descriptor is not None and bool(getattr(descriptor, question)())


def _differentiable(node: object) -> bool:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
