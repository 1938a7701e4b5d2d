"""Loops: of Python, which graphs hold unrolled, and those that are ops, whose bodies run in their captured dtypes."""

from dataclasses import replace

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
    if d.place.body or d.place.inference or d.setting.schedule == "twice" or d.setting.races:
        raise Unfit
    x = d.let(f"{d.value(lambda v: v.dim() >= 2 and v.shape[0] > 1)}.float()")
    d.let(f"torch._higher_order_ops.map(lambda v: v.tanh() * 2, {x})", oracle=f"{x}.tanh() * 2")


_BODIES = ("{v}.tanh() * 2", "{v} * 0.5 + 1", "({v} * {v}).sigmoid()", "{v} + {w}", "{v} * {w}.tanh()")
_PRODUCTS = ("({v} @ {w}).tanh().float()", "F.linear({v}, {w}).relu() + {v}", "({v} @ {w}).float().softmax(-1)")


@statement()
def looped(d: Draft) -> None:
    """torch.while_loop, of a known number of turns; eager mode has a loop."""
    x, body = _of_bodies(d, 2, 3)
    turns, turn = d.pick((3, 2, 1)), d.fresh("body")
    d.do(f"{turn} = lambda i, v: (i + 1, {body.replace('{v}', 'v')})")
    call = f"torch._higher_order_ops.while_loop(lambda i, v: i < {turns}, {turn}, (torch.tensor(0), {x}))[1]"
    d.let(call, oracle=f"[v for v in [{x}] for i in range({turns}) for v in [{turn}(i, v)[1]]][-1]")


@statement()
def written_by_a_loop(d: Draft) -> None:
    """A loop that multiplies a value in place by a power of two, which rounds nothing in any dtype.

    Under a named policy a loop keeps its captured dtype, float32, which holds what the policy has in 16 bits; bfloat16
    and float16 do not hold each other's values.
    """
    _require_place(d)
    x = d.value(lambda v: v.dim() >= 1)
    size = d.shape(x)[-1]
    made = d.lowered(x) if d.setting.ambient else f"F.linear({x}.float(), {d.weight(size, size)})"
    h = d.let(f"{made}.detach() * 0.5")
    turn, ones = f"lambda i, v: ((i + 1, v * 1), {h}.mul_(2.0))[0]", "(torch.tensor(0), torch.ones(2))"
    loop = f"torch._higher_order_ops.while_loop(lambda i, v: i < 2, {turn}, {ones})"
    with d.block("with torch.no_grad():", replace(d.place, grad=False)):
        d.do(loop, oracle=f"{h}.mul_(4.0)")


@statement()
def scanned(d: Draft) -> None:
    """torch.scan along the rows, which returns the last state and what each turn gives."""
    x, body = _of_bodies(d, 3)
    start, turn = d.let(f"{x}[0] * 0.5"), d.fresh("body")
    d.do(f"{turn} = lambda v, u: ({body.replace('{v}', '(v + u)')}, v * 2)")
    turns = f"[s for v in [{start}] for u in {x} for s in [{turn}(v, u)] for v in [s[0]]]"
    call = f"torch._higher_order_ops.scan({turn}, {start}, {x})"
    d.let_several(call, 2, oracle=f"(lambda turns: (turns[-1][0], torch.stack([two for _, two in turns])))({turns})")


def _require_place(d: Draft) -> None:
    if d.place.body or d.place.inference or d.place.region or d.setting.schedule == "twice" or d.setting.races:
        raise Unfit


def _of_bodies(d: Draft, *ranks: int) -> tuple[str, str]:
    """What a loop goes over, float32 for everyone, and its body, an expression of ``{v}``.

    Bodies run in the dtypes that they are captured with: products are autocast's where Dynamo captures under it.
    """
    _require_place(d)
    x = d.let(f"{d.ranked(*ranks)}.float()")
    size = d.shape(x)[-1]
    body = d.pick(_BODIES + _PRODUCTS * d.setting.ambient)
    return x, body.replace("{w}", d.parameter(*[size] * (2 if body in _PRODUCTS else 1)))
