"""Loops: of Python, which graphs hold unrolled, and those that are ops, whose bodies run in their captured dtypes."""

from programs.draft import Draft, Unfit
from programs.statements.registry import statement


@statement()
def unrolled(d: Draft) -> None:
    """Every turn reads the same weights."""
    with d.block("for _ in range(2):", d.place):
        d.statements(3)


@statement()
def one_layer_in_turns(d: Draft) -> None:
    """A layer over its own results."""
    x = d.value(lambda v: v.dim() >= 1)
    weight = d.weight(d.shape(x)[-1], d.shape(x)[-1])
    for _ in range(d.pick((2, 3))):
        x = d.let(f"F.linear({d.lowered(x)}, {weight}).{d.pick(('tanh', 'relu', 'sigmoid'))}()")


@statement()
def mapped(d: Draft) -> None:
    """The operand and the result are float32 for everyone."""
    if d.place.body or d.place.inference or d.setting.schedule == "twice":
        raise Unfit
    x = d.let(f"{d.value(lambda v: v.dim() >= 2 and v.shape[0] > 1)}.float()")
    d.let(f"torch._higher_order_ops.map(lambda v: v.tanh() * 2, {x})", oracle=f"{x}.tanh() * 2")
