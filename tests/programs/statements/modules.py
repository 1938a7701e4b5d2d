"""Submodules, whose weights are the program's own, and calls of them with other weights.

The oracle's source has what they compute, and no module.
"""

from dataclasses import replace

from programs.draft import Draft, Unfit
from programs.statements.registry import statement

#: ``hooks`` double what comes in and halve what goes out.
_LAYER = """\
class Layer(nn.Module):
    def __init__(self, weight, bias=None, hooks=False):
        super().__init__()
        self.weight, self.bias = weight, bias
        if hooks:
            twice = lambda module, args, named: ((), {"x": (args or tuple(named.values()))[0] * 2})
            self.register_forward_pre_hook(twice, with_kwargs=True)
            self.register_forward_hook(lambda module, args, result: result * 0.5)

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)
"""

#: One weight under two names.
_TIED = """\
class Tied(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.first, self.second = weight, weight

    def forward(self, x):
        return F.linear(F.linear(x, self.first).tanh(), self.second)
"""


#: Calls of several such modules share one body, which Dynamo captures once.
_NESTED = """\
class Nested(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    @torch.compiler.nested_compile_region
    def forward(self, x):
        return F.linear(x, self.weight).tanh(), x * 0.5
"""


@statement(weight=2)
def submodule(d: Draft) -> None:
    """Called once or twice, perhaps in a checkpoint or by keyword."""
    x = d.value(lambda v: v.dim() >= 1)
    module, code, size = _module(d, d.shape(x)[-1])
    for _ in range(d.pick((1, 1, 2)) if size == d.shape(x)[-1] else 1):
        x = _call(d, module, code, x)


@statement()
def nested_regions(d: Draft) -> None:
    """Calls in a ``torch.compiler.nested_compile_region``, each of which takes the result of the one before.

    All have one weight or each has its own, which nothing reads before: torch 2.13's Dynamo gives a weight that two
    share, or that is read outside, to later ones too.
    """
    if d.place.body or d.place.inference or d.setting.races:
        raise Unfit
    x = d.value(lambda v: v.dim() >= 1 and v.numel() > 0)
    known = set(d.parameters)
    weights = [d.parameter(d.shape(x)[-1], d.shape(x)[-1]) for _ in range(d.pick((2, 2, 3)))]
    names = list(map(d.first_name, weights))
    every = [*d.region_weights, *names]
    if len(set(every)) != 1 and (len(set(every)) != len(every) or not known.isdisjoint(names)):
        raise Unfit
    d.region_weights = every
    d.define("Nested", _NESTED)
    for weight in weights:
        call, own = f"{d.module(f'Nested({weight})')}({x})", f"F.linear({d.lowered(x)}, {d.lowered(weight)})"
        x, _ = d.let_several(call, 2, oracle=f"({own}.tanh(), {x} * 0.5)")


def _call(d: Draft, module: str, code: str, x: str) -> str:
    outside, oracle = d.place, code.replace("{x}", x)
    if d.place.body or not d.place.grad or not d.chance(3):
        return d.let(d.pick(("{}({})", "{}({})", "{}(x={})")).format(module, x), oracle=oracle)
    d.place = replace(outside, body=d.fresh("body"))
    try:
        return d.let(f"checkpoint({module}, {x}, use_reentrant=False)", oracle=oracle)
    finally:
        d.place = outside


def _module(d: Draft, size: int) -> tuple[str, str, int]:
    """A new module, what it computes of ``{x}``, and the size of its result."""
    if d.chance(3):
        weight = d.parameter(size, size)
        d.define("Tied", _TIED)
        return d.module(f"Tied({weight})"), _tied(d, weight), size
    rows, bias = d.pick((size, 4)), d.chance()
    weight, bias = d.parameter(rows, size), d.parameter(rows) if bias else "None"
    hooks = d.chance(3)
    d.define("Layer", _LAYER)
    return d.module(f"Layer({weight}, {bias}, {hooks})"), _layer(d, weight, bias, hooks), rows


def _tied(d: Draft, weight: str) -> str:
    own = d.lowered(weight)
    return f"F.linear(F.linear({d.lowered('{x}')}, {own}).tanh(), {own})"


def _layer(d: Draft, weight: str, bias: str, hooks: bool) -> str:
    operands = ", ".join([d.lowered(weight), *([d.lowered(bias)] if bias != "None" else [])])
    return f"F.linear({{x}} * 2, {operands}) * 0.5" if hooks else f"F.linear({d.lowered('{x}')}, {operands})"


@statement()
def functional_call(d: Draft) -> None:
    """With weights that are computed, or those of another module; a weight of two names is given once."""
    if d.place.inference:
        raise Unfit
    x = d.value(lambda v: v.dim() >= 1)
    size = d.shape(x)[-1]
    own, other = d.parameter(size, size), d.parameter(size, size)
    if d.chance():
        other = d.let(d.pick(("{} * 2", "{}.tanh()", "{0} + {1}", "{}.detach()")).format(other, own))
    if d.chance():
        d.define("Tied", _TIED)
        module, name, oracle = d.module(f"Tied({own})"), "first", _tied(d, other)
    else:
        d.define("Layer", _LAYER)
        module, name, oracle = d.module(f"Layer({own})"), "weight", _layer(d, other, "None", False)
    call = f"torch.func.functional_call({module}, {{'{name}': {other}}}, ({x},))"
    d.let(call, oracle=oracle.replace("{x}", x))
