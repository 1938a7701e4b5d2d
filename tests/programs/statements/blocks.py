"""Statements around statements: no_grad, enable_grad, checkpoint, cond; and graph breaks."""

from dataclasses import replace

import torch
from programs.draft import Draft, Unfit
from programs.statements.registry import statement


@statement()
def no_grad(d: Draft) -> None:
    with d.block("with torch.no_grad():", replace(d.place, grad=False)):
        d.statements(3)


@statement()
def enable_grad(d: Draft) -> None:
    """Inside of no_grad: what is made here has gradients."""
    if d.place.grad or d.place.inference:
        raise Unfit
    with d.block("with torch.enable_grad():", replace(d.place, grad=True)):
        d.statements(3)


@statement(weight=2)
def checkpointed(d: Draft) -> None:
    """Of one or two operands and results, perhaps selective. The oracle calls the body as it is."""
    if d.place.body or not d.place.grad:
        raise Unfit
    operands, body = [d.value() for _ in range(d.pick((1, 1, 2)))], d.fresh("body")
    count = d.pick((1, 1, 2))
    with d.function(body, {d.fresh("a"): operand for operand in operands}):
        d.statements(3)
        d.give(*(d.value() for _ in range(count)))
    names = ", ".join(operands)
    options = f"use_reentrant=False{d.pick(_OPTIONS)}"
    d.let_several(f"checkpoint({body}, {names}, {options})", count, oracle=f"{body}({names})")


#: A policy of ``ops.mm`` sees those of the rewritten graph; one that is a function sees every op.
_SELECTIVE = ", context_fn=partial(create_selective_checkpoint_contexts, {})"
_OPTIONS = (
    "", "", "", ", preserve_rng_state=False", ", determinism_check='none'",
    _SELECTIVE.format("[torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]"),
    _SELECTIVE.format("[torch.ops.aten.tanh.default, torch.ops.aten.mul.Tensor, torch.ops.aten._to_copy.default]"),
    _SELECTIVE.format("lambda ctx, op, *args, **named: CheckpointPolicy.PREFER_SAVE"),
    _SELECTIVE.format("lambda ctx, op, *args, **named: CheckpointPolicy.MUST_RECOMPUTE"),
)  # fmt: skip


_ENDS = ("{} * 2", "{} * 2", "{} * torch.tensor([0.5, 1.0]).sum()")
_PREDICATES = ("{}.sum() > 0", "({} > 2).any()", "{}.flatten()[0] < 0")


@statement()
def branches(d: Draft) -> None:
    """torch.cond, whose branches return new tensors that are alike. The oracle has an ``if``."""
    if d.place.body or d.place.inference or d.setting.races:
        raise Unfit
    x, names = d.value(lambda v: v.numel() > 0), (d.fresh("body"), d.fresh("body"))
    alike: list[tuple[object, ...]] = []
    with d.whole():
        for body in names:
            own = d.fresh("a")
            with d.function(body, {own: x}):
                d.statements(2)
                result = d.let(d.pick(_ENDS).format(d.value(lambda v: v.dim() >= 1)))
                alike.append(d.described(result))
                d.give(result)
        if alike[0] != alike[1]:
            raise Unfit
        which, (one, other) = d.let(d.pick(_PREDICATES).format(f"{x}.detach().float()")), names
        d.let(f"torch.cond({which}, {one}, {other}, ({x},))", oracle=f"({one} if {which} else {other})({x})")


@statement()
def graph_break(d: Draft) -> None:
    """Each graph casts weights anew; under a policy every value crosses in the dtype that it was captured with.

    With a scaler values of 16 bits cross in float32 under autocast too, whoever made them. A program that says by its
    regions what is cast must say so in its first graph. Of the blocks, those of gradients can be broken.
    """
    break_graph(d, "torch._dynamo.graph_break()")


def break_graph(d: Draft, code: str) -> None:
    """``code``, at which Dynamo breaks the graph."""
    if d.place.body or d.place.region or d.place.inference:
        raise Unfit
    if (d.setting.ambient and d.setting.scaled) or d.setting.own or d.setting.schedule == "rewritten":
        raise Unfit
    wider = {} if d.setting.ambient else _wider(d)
    widened = "".join(f"; {name} = torch.enable_grad()({name}.to)({dtype})" for name, dtype in wider.items())
    d.do(code, oracle=f"torch.clear_autocast_cache(){widened}")


def _wider(d: Draft) -> dict[str, torch.dtype]:
    """What leaves a graph in a different dtype than under autocast; a piece of memory must do so as one value."""
    values = d.values
    wider = {name: d.captured_dtype(name) for name, v in values.items() if v.dtype != d.captured_dtype(name)}
    memory = [value.untyped_storage()._cdata for value in values.values()]
    if any(memory.count(values[name].untyped_storage()._cdata) > 1 for name in wider):
        raise Unfit
    return wider
