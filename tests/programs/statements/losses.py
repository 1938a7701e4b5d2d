"""Cross entropies of linear layers, in every form and place that a rule with ``chunks`` may cut or must leave whole."""

from dataclasses import replace
from math import prod
from typing import Any

import torch
from programs.draft import Draft, Unfit
from programs.statements.registry import statement

#: What stands between the rows of logits and the loss.
_OF_ROWS = (
    "{}", "{}.float()", "{}.double()", "{}[1:]", "{}.contiguous()", "{}.clone()", "{}.to('cpu')", "{} * 2",
    "{}.half().float()", "{}.view(-1, {}.shape[-1])", "{}.t().contiguous().t()",
)  # fmt: skip

#: The same for logits of three dimensions; the classes come last or second.
_OF_SEQUENCES = (
    "{}.view(-1, {}.shape[-1])", "{}[:, :-1].contiguous().view(-1, {}.shape[-1])", "{}.flatten(0, 1)",
    "{}[:, 1:].reshape(-1, {}.shape[-1])", "{}.float().view(-1, {}.shape[-1])", "{}.transpose(1, 2)",
    "{}.permute(0, 2, 1)", "{}.double().transpose(1, 2)", "{}[..., 1:].flatten(0, 1)", "{}[:, -1]",
)  # fmt: skip


@statement(weight=2)
def loss_of_layer(d: Draft) -> None:
    _loss(d, _layer(d))


#: Headers of blocks, and what they change of the place.
_BLOCKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("for _ in range(2):", {}),
    *[("with torch.no_grad():", {"grad": False})] * 2,
    ('with torch.autocast("cpu", enabled=False):', {"region": True, "lower": None}),
    ('with torch.autocast("cpu", torch.bfloat16):', {"region": True, "lower": torch.bfloat16}),
    ('with torch.autocast("cpu", torch.float16):', {"region": True, "lower": torch.float16}),
)


@statement()
def loss_in_block(d: Draft) -> None:
    """The block holds the loss, the layer, or both."""
    header, changes = d.pick(_BLOCKS)
    before = _layer(d) if d.chance(4) else None
    with d.block(header, replace(d.place, **changes)):
        layer = before or _layer(d)
        inside = before is not None or d.chance(3)
        if inside:
            _loss(d, layer)
    if not inside:
        _loss(d, layer)


@statement()
def loss_checkpointed(d: Draft) -> None:
    """The oracle calls the body as it is."""
    if d.place.body or not d.place.grad:
        raise Unfit
    x, body, own = d.value(), d.fresh("body"), d.fresh("a")
    with d.function(body, {own: x}):
        d.give(_loss(d, _layer(d)))
    d.let(f"checkpoint({body}, {x}, use_reentrant=False)", oracle=f"{body}({x})")


def _layer(d: Draft) -> str:
    """The results of a linear layer, of two or three dimensions."""
    x = d.value(lambda v: v.dim() in (2, 3) and v.numel() > 0 and prod(v.shape[:-1]) > 2)
    classes = d.pick((8, 12, 4))
    weight = d.parameter(classes, d.shape(x)[-1])
    bias = d.parameter(classes) if d.chance() else None
    operands = [operand for operand in (x, weight, bias) if operand is not None]
    exact = f"exactly(F.linear({', '.join(f'exactly({operand})' for operand in operands)}))"
    return d.let(f"F.linear({', '.join(map(d.lowered, operands))})", exact=exact)


def _loss(d: Draft, layer: str) -> str:
    """The loss of a layer's results."""
    between = d.pick(_OF_ROWS if len(d.shape(layer)) == 2 else _OF_SEQUENCES)
    logits = d.let(between.replace("{}", layer))
    target, form = _target(d, logits)
    if "softmax" in target and d.place.region and d.place.lower is None:
        logits = d.let(f"{logits}.float()")  # eager mode would multiply 16-bit logarithms; a graph has one dtype
    exact_target, exact_form = (text.replace(".float()", ".double()") for text in (target, form))
    loss = d.let(
        f"F.cross_entropy({logits}, {target}{form})",
        exact=f"F.cross_entropy({logits}.double(), {exact_target}{exact_form})",
    )
    if d.chance(4):  # a z-loss
        rows, dim = (logits, 1) if d.chance() else (layer, -1)
        log_sums = f"{rows}{{}}.logsumexp({dim}{d.pick(('', ', keepdim=True'))}).pow(2)"
        z_loss = d.pick(("{}.mean()", "{}.sum() * 1e-2", "({}[1:] * 0.1).mean()")).format(log_sums)
        d.let(z_loss.format(""), exact=z_loss.format(".double()"))
    if d.chance(8):
        d.let(f"{d.pick((layer, logits))}.mean()")
    return loss


def _target(d: Draft, logits: str) -> tuple[str, str]:
    """The target, and the other arguments of the loss; their floating parts end in ``.float()``."""
    rows, classes, *columns = d.shape(logits)
    form = d.pick(("", ", reduction='sum'", ", reduction='none'")) + d.pick(("", "", ", label_smoothing=0.1"))
    if d.chance(3):
        weight = d.pick((f"torch.arange({classes})", f"{d.buffer(classes)}.abs()", f"{d.parameter(classes)}.abs()"))
        form += f", weight={weight}.float()"
    idle = not d.values[logits].requires_grad  # then the loss has the gradient of its target alone
    if idle or d.chance(3):
        shape = (rows, classes, *columns)
        probabilities = d.parameter(*shape) if idle or d.chance() else d.buffer(*shape)
        return f"{probabilities}.softmax(1).float()", form
    count = rows * prod(columns)
    numbers = f"torch.arange({count}) % {classes}"
    ignored = d.pick((0, 0, 1, 3, count))
    if ignored > 1:  # rows with the default index that does not count
        numbers = f"torch.where(torch.arange({count}) < {ignored}, -100, {numbers})"
    target = f"({numbers}).view({', '.join(map(str, (rows, *columns)))})"
    return target, form + (", ignore_index=1" if ignored == 1 else "")
