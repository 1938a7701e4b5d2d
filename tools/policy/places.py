"""Find the values of a captured graph that a policy puts into 16 bits, and their ops, by rewriting a copy of it."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fxamp.capture import Captured, capture
from fxamp.graph import all_graphs, argument, base_name, dtype_of, is_mutable, module_path, op_name
from fxamp.graph.aliases import aliased_inputs
from fxamp.passes.base import CastContext
from fxamp.passes.forward.expand_composites import ExpandComposites
from fxamp.passes.forward.scale_products import EXPERTS, SCALED
from fxamp.passes.shared.decision import decision, inserted_for
from fxamp.passes.shared.sites import computes, site_of
from fxamp.pipeline import cast_graph
from fxamp.policy import CastRule, Category, Policy, Recipe
from fxamp.tools.policy.operands import Operand, operands
from fxamp.torch_dtypes import NARROW


@dataclass(frozen=True)
class ModuleOp:
    """An op in a module, as a rule can name it. ``module``: a dotted path, ``""`` for the root; ``op``: its name."""

    module: str
    op: str


@dataclass(frozen=True)
class Use:
    """A call at a place.

    ``values`` maps the node names of the values that the call reads or returns in 16 bits under the policy to their
    role ("input", "weight", "result"); what is written to the result in place is one too ("result after exp in
    place"). ``raised``: a rule of the policy keeps the call in float32; ``values`` are then all that it reads and
    returns. ``recipe``: how it multiplies in fp8, None if it does not; ``operands`` are then what it rounds to 8 bits.
    """

    place: ModuleOp
    values: Mapping[str, str]
    raised: bool = False
    recipe: Recipe | None = None
    operands: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Watched:
    """A graph to watch, as captured but with composites expanded as the policy's passes do, and its uses.

    ``uses`` are listed by graph: those of ``module`` first, then those of the bodies, in the order of ``all_graphs``.
    """

    module: GraphModule
    uses: tuple[tuple[Use, ...], ...]


def watched(gm: GraphModule, inputs: Sequence[Any], policy: Policy) -> Watched:
    """Capture ``gm`` for ``inputs``; tensors of every device count as the policy's."""
    shown, rewritten = capture(gm, inputs), capture(gm, inputs)
    ExpandComposites().run(shown.module, _context(shown, policy))
    cast_graph(rewritten, _context(rewritten, policy))
    pairs = zip(all_graphs(shown.module), all_graphs(rewritten.module), strict=True)
    return Watched(shown.module, tuple(tuple(_uses(*pair, policy)) for pair in pairs))


def _context(captured: Captured, policy: Policy) -> CastContext:
    return CastContext(captured.mode, policy, every_device=True)


def _uses(shown: GraphModule, rewritten: GraphModule, policy: Policy) -> Iterator[Use]:
    lower = getattr(torch, policy.lower_precision_fp)
    after = {node.name: node for node in rewritten.graph.nodes}
    writes = _writes(shown)
    for node in shown.graph.nodes:
        changed = after.get(node.name)
        if not _computes(node) or changed is None:
            continue
        place = ModuleOp(module_path(node), op_name(node))
        read = {_origin(source).name: source for source in changed.all_input_nodes} | {node.name: changed}
        written = {
            write.name: f"result after {base_name(write).removeprefix('aten::')} in place"
            for write in writes.get(node, ())
        }
        read |= {name: after[name] for name in written if name in after}
        labels = (*_labels(node), *written.items())
        known = {name: label for name, label in labels if name in read}
        low = {name: label for name, label in known.items() if dtype_of(read[name]) is lower}
        if low:
            recipe = Recipe(argument(changed, "recipe")) if changed.target in (SCALED, EXPERTS) else None
            yield Use(place, low, False, recipe, () if recipe is None else tuple(operands(node, recipe)))
        elif known and _raised(changed):
            yield Use(place, known, raised=True)


def _writes(shown: GraphModule) -> Mapping[Node, list[Node]]:
    """Return the calls that write to each result in place, which happens in the dtype that its op returns."""
    writes: dict[Node, list[Node]] = defaultdict(list)
    for node in shown.graph.nodes:
        if is_mutable(node) and dtype_of(node) in _CASTABLE:
            written = node
            while len(sources := aliased_inputs(written)) == 1:
                (written,) = sources
            writes[written].append(node)
    return writes


def _computes(node: Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    return not node.target._schema.is_mutable and computes(node, site_of(node).args.get("dtype"))


def _labels(node: Node) -> Iterator[tuple[str, str]]:
    """Yield the names of the floating-point values that a call reads and returns, each with its role.

    In an autocast region of the program they were captured in 16 bits, but they are watched in float32.
    """
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    for name, value in (*zip(names, node.args, strict=False), *node.kwargs.items()):
        for source in pytree.tree_leaves(value):
            if isinstance(source, Node) and dtype_of(source) in _CASTABLE:
                yield source.name, _WORDS.get(name, name)
    if dtype_of(node) in _CASTABLE:
        yield node.name, "result"


_CASTABLE = frozenset({torch.float32, *NARROW})

#: Roles of arguments whose schema name is that of a method's object.
_WORDS = {"self": "input", "other": "second input", "mat2": "second input", "tensors": "input"}


def _origin(node: Node) -> Node:
    """Return the value of the program that a cast was made from."""
    while inserted_for(node) is not None and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _raised(changed: Node) -> bool:
    decided = decision(changed)
    rule = None if decided is None else decided.rule
    return rule is not None and not (isinstance(rule, CastRule) and rule.cast is Category.LOWER_PRECISION_FP)
