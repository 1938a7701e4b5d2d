"""annotate-rules: give every operation the policy's decision for it.

1. The last rule of the policy that covers a call applies. If none does, the autocast kernel that the op's library
   registered applies, whatever dtype it casts to, and without one the policy's ``unlisted``, except to calls that only
   move values or that name their dtype.
2. Inside ``torch.autocast(enabled=False)`` no rule applies; inside another region its dtype replaces the policy's.
3. In-place and ``out=`` calls, views of memory that the program writes to, and calls that fxamp leaves verbatim follow
   their inputs, whatever a rule of the policy says. So do calls that a rule would make round whole numbers, such as
   positions, to 16 bits, unless the program itself calls them under autocast: models switch autocast off there, but
   some only where it is on, which a graph captured without autocast does not show.
4. The backward of a custom autograd.Function is in the same region as its forward, unless ``custom_fwd``'s
   ``cast_inputs`` turned autocast off in both. The same holds for such a forward that Dynamo inlined. No rule applies
   in a hook on a gradient, because eager programs run the backward outside of autocast.
5. If a chunk rule covers a loss and no other rule does, the decision names the chunk rule, and the loss is computed in
   float32.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import zip_longest

from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fxamp.capture import CUSTOM_AUTOCAST, VERBATIM, CustomAutocast, is_verbatim
from fxamp.errors import BannedOpError
from fxamp.graph import describe_source, is_mutable, module_path
from fxamp.graph.aliases import AliasSets, is_view
from fxamp.graph.higher_order_ops import Body, autograd_function, bodies, gradient_hook
from fxamp.passes.base import CastContext, Pass, Result
from fxamp.passes.shared.autocast_regions import AutocastRegion, mark_region, outermost, walk
from fxamp.passes.shared.custom_autocast import cast_inlined, cast_inputs, drop_outermost_region
from fxamp.passes.shared.decision import Decision, decide, decision
from fxamp.passes.shared.linear_losses import LinearLoss, linear_loss
from fxamp.passes.shared.registered_autocast import REGISTERED_ID, is_registered, kernel_dtypes, registered_rule
from fxamp.passes.shared.rule_arguments import require_arguments
from fxamp.passes.shared.sites import ruling_on, site_of
from fxamp.passes.shared.whole_numbers import rounded_numbers
from fxamp.policy import CastRule, Category, Rule, Ruling
from fxamp.policy.model.recipe import RECIPES_OF

#: The categories that round inputs to 16 bits or fewer.
_ROUNDS = (Category.LOWER_PRECISION_FP, *RECIPES_OF)


@dataclass(frozen=True)
class AnnotateRules(Pass[CastContext]):
    """Requires a captured graph; ensures a decision on every call of an op. Changes only the metadata of nodes."""

    name = "annotate-rules"

    def run(self, gm: GraphModule, context: CastContext) -> Result:
        for rule in context.policy.rules:
            if rule.args or (isinstance(rule, CastRule) and rule.inputs):
                require_arguments(rule)
        return Result(_annotate(gm, context, outermost(context)))

    def ensures(self, gm: GraphModule, context: CastContext) -> str | None:
        for node in gm.graph.nodes:
            if isinstance(node.target, OpOverload) and decision(node) is None:
                return f"node {node.name} has no decision"
        return None


def _annotate(gm: GraphModule, context: CastContext, region: AutocastRegion, in_function: bool = False) -> int:
    changed = 0
    aliases = cache(lambda: AliasSets(gm.graph))  # computed on demand, because few policies have rules for views
    for node, here in walk(gm, context, region):
        if node.op not in ("call_function", "call_method", "call_module"):
            continue
        if _follows_policy(here) and cast_inlined(node, context, in_function):
            here = here.disabled
        choice = _decide(node, here, context, aliases)
        changed += choice != decision(node)
        decide(node, choice)
        if context.policy.has_rules_for("backward") or context.policy.has_rules_for("kept"):
            mark_region(node, here, context)
        changed += sum(_annotate(_body(body), context, here, in_function) for body in bodies(node))
        hook = gradient_hook(node)
        changed += 0 if hook is None else _annotate(_body(hook), context, here.disabled)
        changed += _annotate_function(node, context, here)
    return changed


def _decide(node: Node, region: AutocastRegion, context: CastContext, aliases: Callable[[], AliasSets]) -> Decision:
    if is_verbatim(node):
        return Decision(None, None, f"verbatim: {node.meta[VERBATIM]}")
    lower = region.lower or context.lower
    dtypes = kernel_dtypes(node, lower, context) if is_registered(node, context) else None
    ruling = rule_on(node, None if dtypes is None else registered_rule(node, dtypes, lower), context)
    choice = _ruled(node, ruling, region, context, aliases)
    if dtypes is not None and _is_by_kernel(ruling, choice):
        choice = replace(choice, kernel=tuple((name, dtype) for name, dtype in dtypes.items() if dtype is not None))
    why = _not_fp8(ruling, choice)
    return replace(choice, not_fp8=why) if why else choice


def _not_fp8(ruling: Ruling, choice: Decision) -> str:
    """Return why a call that a rule for fp8 names does not run in fp8; "" for every other call."""
    if ruling.rule is not None and ruling.rule.in_fp8:
        return "" if choice.rule is not None else choice.reason
    won = [rule.id for rule in ruling.lost if rule.in_fp8]
    if won and ruling.rule is not None:
        return _joined(f"rule {ruling.rule.id} comes after {won[-1]}", ruling.rule.why)
    others = ((rule, mismatch) for rule, mismatch in ruling.inapplicable if rule.in_fp8)
    return _joined(*(f"rule {rule.id} does not apply: {mismatch.why}" for rule, mismatch in others))


def _ruled(
    node: Node, ruling: Ruling, region: AutocastRegion, context: CastContext, aliases: Callable[[], AliasSets]
) -> Decision:
    rule = ruling.rule
    if rule is None:
        return Decision(None, region.lower, _joined("no rule: follows its inputs", ruling.unknown))
    why = _why_not(node, rule, region, aliases)
    if why:
        return Decision(None, region.lower, f"{why}, so rule {rule.id} does not apply")
    if isinstance(rule, CastRule) and rule.cast is Category.BANNED:
        raise BannedOpError(_refusal(node, rule.advice, context))
    return Decision(rule, region.lower, _joined(rule.why, ruling.unknown), lost=ruling.lost, cached=region.cached)


def _why_not(node: Node, rule: Rule, region: AutocastRegion, aliases: Callable[[], AliasSets]) -> str:
    """Return why a rule that covers a call does not apply to it, "" if it does (2, 3)."""
    if region.lower is None:
        return "autocast is disabled here"
    if is_mutable(node) and rule.id != REGISTERED_ID:
        return "in-place and out= calls follow their inputs"
    if is_view(node) and aliases().mutated(node):
        return "a view of written memory must stay a view"
    rounds = isinstance(rule, CastRule) and rule.cast in _ROUNDS
    return rounded_numbers(node, region.lower) if rounds and _follows_policy(region) else ""


def rule_on(node: Node, registered: CastRule | None, context: CastContext) -> Ruling:
    """Return the policy's ruling for a call: by its rules (5), else as (1) says; an empty one if it is not an op.

    ``registered``: the casts of the op's autocast kernel as a rule.
    """
    if not isinstance(node.target, OpOverload):
        return Ruling(None)
    policy = context.policy
    ruling = ruling_on(node, policy)
    if ruling.rule is None and isinstance(loss := linear_loss(node, context), LinearLoss):
        return replace(ruling, rule=loss.rule)
    if ruling.rule is None and is_registered(node, context):
        return replace(ruling, rule=registered)
    if ruling.rule is None and policy.default_rule is not None and site_of(node).computes:
        return replace(ruling, rule=policy.default_rule)
    return ruling


def _is_by_kernel(ruling: Ruling, choice: Decision) -> bool:
    """Whether the casts of the op's autocast kernel are those of ``choice``: a rule of the policy comes first."""
    return choice.lower is not None and (ruling.rule is None or ruling.rule.id == REGISTERED_ID)


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _refusal(node: Node, advice: str, context: CastContext) -> str:
    where = f" in module {module_path(node)!r}" if module_path(node) else ""
    return f"{advice}\n  policy {context.policy.name}, at {describe_source(node)}{where}"


def _follows_policy(region: AutocastRegion) -> bool:
    """Whether autocast is on under the policy alone: if it was on in the capture too, ``custom_fwd`` has cast."""
    return region.captured is None and region.lower is not None


def _annotate_function(node: Node, context: CastContext, region: AutocastRegion) -> int:
    function = autograd_function(node)
    if function is None:
        return 0
    request: CustomAutocast | None = node.meta.get(CUSTOM_AUTOCAST)
    if request is not None and request.device != context.policy.device:
        request = None
    inside = region
    if request is not None and request.cast_inputs is not None and _follows_policy(region):
        cast_inputs(function.forward.module, request.cast_inputs, context)
        inside = region.disabled
    if request is not None and request.decorated_backward and region.captured is None:
        drop_outermost_region(function.backward.module)
    return sum(_annotate(_body(part), context, inside, True) for part in (function.forward, function.backward))


def _body(body: Body) -> GraphModule:
    """Return the body's graph, with the stack of each operand on its input: Dynamo's is that of the first reader."""
    for placeholder, operand in zip_longest(body.module.graph.find_nodes(op="placeholder"), body.operands):
        if placeholder is not None:
            placeholder.meta["stack_trace"] = operand.meta.get("stack_trace") if isinstance(operand, Node) else None
    return body.module
