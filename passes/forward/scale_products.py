"""scale-products: run the products that rules with ``cast = "fp8"``, ``"mxfp8"`` or ``"nvfp4"`` cover in these formats.

1. ``linear``, ``addmm``, ``mm`` and ``matmul`` become ``torch.ops.fxamp.scaled_linear``, which AOTAutograd traces
   through. It reads the activation in 16 bits, and the weight before the cast that fxamp inserted for the product.
   With a 3-d weight, one matrix for each expert, ``bmm``, ``baddbmm``, ``matmul``, ``_grouped_mm`` and transformers'
   op for it become ``torch.ops.fxamp.scaled_experts``.
2. The second operand must be a weight: an input of the program or a constant, or a view or cast of one. The second
   operand of ``linear`` always counts as one.
3. A product that the kernels do not support stays in 16 bits, and its decision says why. A recipe is data: the pass
   reads its sizes, and passes its name to the op.
4. A product in code with gradients also stays in 16 bits if the program writes to its weight. The op saves the weight
   itself, while a product in 16 bits saves a copy, the cast, and autograd rejects a saved tensor that was written to
   since. A compiled backward also quantizes the weight again, from an input of the graph, so that a write before the
   product would count twice.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

import fxamp.kernels.products  # noqa: F401 (registers the ops)
from fxamp.graph import INSERTED, GraphWriter, all_nodes, argument, is_wrapper, op_name, tensor_value
from fxamp.graph.aliases import is_view
from fxamp.graph.higher_order_ops import autograd_function, bodies
from fxamp.graph.scope import Scope
from fxamp.passes.base import CastContext, Pass, Result, broken_by
from fxamp.passes.shared.cast_writer import CONVERSIONS, before_cast
from fxamp.passes.shared.decision import Decision, decision, keep_out_of_fp8
from fxamp.policy import RECIPES, CastRule, Recipe
from fxamp.torch_private import hint

aten = torch.ops.aten

DEVICES = ("cuda", "cpu")
"""The devices on which ``torch._scaled_mm`` supports every recipe."""

SCALED = torch.ops.fxamp.scaled_linear.default
EXPERTS = torch.ops.fxamp.scaled_experts.default


@dataclass(frozen=True)
class ScaleProducts(Pass[CastContext]):
    """Requires inserted casts; ensures that every product with an fp8 rule runs in fp8 or records why not."""

    name = "scale-products"

    def run(self, gm: GraphModule, context: CastContext) -> Result:
        if not context.policy.has_fp8:
            return Result(0)
        gradients = torch.is_grad_enabled() and any(map(_learns, gm.graph.nodes))
        with context.computing():
            scaled = _scale(gm, context, Scope(gm.graph, gradients))
        return Result(scaled, {"scaled": scaled})

    def ensures(self, gm: GraphModule, context: CastContext) -> str | None:
        return broken_by("products left in 16 bits", (node for node in all_nodes(gm) if asked_in_fp8(node) is not None))


@dataclass(frozen=True)
class Operands:
    """The operands of ``input @ weight + bias``, or if ``transposed`` of ``input @ weight.T + bias``.

    ``offsets``: where the rows of each expert end. ``dimensions``: the numbers of dimensions that the weight may have.
    """

    input: Node
    weight: Node
    bias: Node | None = None
    transposed: bool = False
    offsets: Node | None = None
    dimensions: tuple[int, ...] = (2,)


def operands_of(product: Node) -> Operands:
    """Return the operands of a product of :data:`_PRODUCTS`, as it is before this pass."""
    return _PRODUCTS[op_name(product).removesuffix(".default")](product)


def asked_in_fp8(node: Node) -> Decision | None:
    """Return the decision on ``node`` if it asks for fp8 and has not been applied yet."""
    choice = decision(node)
    if choice is None or choice.rule is None or not choice.rule.in_fp8:
        return None
    applied = choice.overruled or getattr(node.target, "namespace", "") == "fxamp"
    return None if choice.lower is None or applied else choice


def _learns(node: Node) -> bool:
    """Whether ``node`` is an input or a constant that needs a gradient."""
    value = tensor_value(node)
    return node.op in ("placeholder", "get_attr") and value is not None and value.requires_grad


def _scale(gm: GraphModule, context: CastContext, scope: Scope) -> int:
    """Replace the products of one graph, whose scope is ``scope``."""
    scaled = 0
    for node in list(gm.graph.nodes):
        choice = asked_in_fp8(node)
        if choice is not None:
            why = why_16_bits(node, choice, context, scope)
            if why:
                keep_out_of_fp8(node, why)
            else:
                _replace(node, choice, context)
                scaled += 1
        for body in bodies(node):
            scaled += _scale(body.module, context, scope.inside(node, body))
        function = autograd_function(node)
        if function is not None:
            for part in (function.forward.module, function.backward.module):
                scaled += _scale(part, context, Scope(part.graph, gradients=False))
    return scaled


def _linear(node: Node) -> Operands:
    input, weight, bias = (argument(node, name) for name in ("input", "weight", "bias"))
    return Operands(input, weight, bias, transposed=True)


def _product(*dimensions: int) -> Callable[[Node], Operands]:
    return lambda node: Operands(node.args[0], node.args[1], dimensions=dimensions)  # type: ignore[arg-type]


def _sum(dimensions: int) -> Callable[[Node], Operands]:
    return lambda node: Operands(node.args[1], node.args[2], node.args[0], dimensions=(dimensions,))  # type: ignore[arg-type]


def _grouped(node: Node) -> Operands:
    return Operands(node.args[0], node.args[1], offsets=argument(node, "offs"), dimensions=(3,))  # type: ignore[arg-type]


_PRODUCTS: Mapping[str, Callable[[Node], Operands]] = {
    "aten::linear": _linear,
    "aten::mm": _product(2),
    "aten::bmm": _product(3),
    "aten::matmul": _product(2, 3),
    "aten::addmm": _sum(2),
    "aten::baddbmm": _sum(3),
    "aten::_grouped_mm": _grouped,
    "transformers::grouped_mm_fallback": _grouped,
}


def why_16_bits(node: Node, choice: Decision, context: CastContext, scope: Scope) -> str:
    """Return why the product, a node of the graph of ``scope``, cannot run as decided, or ""."""
    if op_name(node).removesuffix(".default") not in _PRODUCTS:
        return "it names its dtype"
    operands = operands_of(node)
    values = [tensor_value(operand) for operand in (node, operands.input, operands.weight)]
    result, input, weight = values
    if result is None or input is None or weight is None or any(map(is_wrapper, values)):
        return "its operands are not plain tensors"
    why = _wrong_operands(operands, input, weight, scope)
    if why:
        return why
    if any(argument(node, name) not in (None, 1) for name in ("alpha", "beta")):
        return "it scales its operands by alpha or beta"
    if result.dtype is not choice.lower:
        return f"its result is {result.dtype}".replace("torch.", "")
    assert isinstance(choice.rule, CastRule)
    why = _without_kernel(choice.rule, weight, context)
    if not why and scope.has_gradients(node) and scope.writes_to(before_cast(operands.weight)):
        return "the program writes to its weight"
    return why or _wrong_sizes(input, weight, RECIPES[Recipe(choice.rule.recipe)].multiple)


def _wrong_operands(operands: Operands, input: torch.Tensor, weight: torch.Tensor, scope: Scope) -> str:
    if weight.dim() not in operands.dimensions:
        return f"the second operand has {weight.dim()} dimensions, not {' or '.join(map(str, operands.dimensions))}"
    if input.dim() < 2 - operands.transposed:
        return "the first operand is a vector"
    if weight.dim() == 3 and operands.offsets is None and input.shape[:-2] != weight.shape[:1]:
        return f"it multiplies {weight.shape[0]} matrices by a tensor of {input.dim()} dimensions"
    if not (operands.transposed or _is_weight(operands.weight, scope)):
        return "the second operand is not a weight: the program computes it"
    return ""


def _without_kernel(rule: CastRule, weight: torch.Tensor, context: CastContext) -> str:
    device = context.policy.device if context.every_device else weight.device.type
    if device not in DEVICES:
        return f"{device} has no kernels for it"
    if weight.dim() == 3 and str(rule.cast) not in context.policy.casts_of_experts:
        return "the policy has no rule for products of experts"
    if weight.dim() == 3 and not RECIPES[Recipe(rule.recipe)].grouped:
        return f"products of experts do not take the scales of {rule.recipe}"
    return ""


def _wrong_sizes(input: torch.Tensor, weight: torch.Tensor, multiple: int) -> str:
    for at, size in list(enumerate(weight.shape))[-2:]:
        if not isinstance(size, int) or size % multiple or not size:
            return f"size {at} of the weight is {size}, not a multiple of {multiple}"
    for size in input.shape[:-1]:
        # A symbolic size with an example value is at least 2, since torch makes 0 and 1 constants.
        if hint(size) is None:
            return f"the number of rows ({size}) is not known before it runs, and could be 0"
        if isinstance(size, int) and not size:
            return "it has no rows"
    return ""


def _is_weight(node: Node, scope: Scope) -> bool:
    """Whether ``node`` is an input of the program that is a leaf, or a constant; or a view or cast of one."""
    while node.op not in ("placeholder", "get_attr"):
        passes_on = is_view(node) or node.target in CONVERSIONS or node.target is aten.contiguous.default
        if not passes_on or not isinstance(node.args[0], Node):
            return False
        node = node.args[0]
    if node in scope.bound:
        operand = scope.bound[node]
        return isinstance(operand, Node) and scope.outer is not None and _is_weight(operand, scope.outer)
    value = tensor_value(node)
    return value is not None and value.is_leaf


def _replace(node: Node, choice: Decision, context: CastContext) -> None:
    operands = operands_of(node)
    weight = before_cast(operands.weight)
    experts = tensor_value(weight).dim() == 3  # type: ignore[union-attr]
    if not (experts or operands.transposed):
        with node.graph.inserting_before(node):
            why = f"for {node.name}: its weight, transposed"
            weight = GraphWriter(node.graph, context.mode).call(aten.t.default, weight, near=node, why=why)
    assert isinstance(choice.rule, CastRule)
    node.target = EXPERTS if experts else SCALED
    groups = (operands.offsets,) if experts else ()
    node.args = (operands.input, weight, *groups, operands.bias, str(choice.rule.recipe), choice.lower)
    node.kwargs = {}
    if operands.weight is not weight and INSERTED in operands.weight.meta and not operands.weight.users:
        node.graph.erase_node(operands.weight)
