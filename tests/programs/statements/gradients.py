"""Hooks on gradients, and gradients that a program asks for itself."""

from programs.draft import Draft, Unfit
from programs.statements.blocks import break_graph
from programs.statements.registry import statement
from torch import Tensor

#: What a hook makes of a gradient; torch's scaler shows it a scaled one, so with a scaler it is linear.
_LINEAR = ("{g} * 2", "-{g}", "{g} * 0.5", "{g}.masked_fill({y} > 0, 0)", "{g}.clone()", "None", "{g}.flip(0)")
_OTHERS = ("{g}.clamp(-0.1, 0.1)", "{g} * {g}", "({g} * {y}.detach()).to({g})", "{g} + 1", "{g} / ({g}.norm() + 1)")


@statement(weight=2)
def hook(d: Draft) -> None:
    """On a value that is used before or after, or both."""
    if d.setting.schedule == "evaluated":
        raise Unfit
    x = d.value(lambda v: _is_made(v) and _takes_hooks(v) and v.dim() >= 1)
    d.do(f"{x}.register_hook(lambda g: {_of_gradient(d, x)})")


@statement()
def hook_on_leaf(d: Draft) -> None:
    """Each call adds one; a restarted program has lost those of its calls before."""
    if d.place.body or d.setting.schedule in ("threads", "restart", "rewritten"):
        raise Unfit
    x = d.value(lambda v: _takes_hooks(v) and v.dim() == 2)
    leaf = d.pick((d.parameter(*d.shape(x)), x))
    d.do(f"{leaf}.register_hook(lambda g: {_of_gradient(d, x)})")


def _is_made(value: Tensor) -> bool:
    """Whether a value has a gradient and is no leaf; autograd does not say so of views that a write made invalid."""
    try:
        return value.grad_fn is not None
    except RuntimeError:
        return False


def _takes_hooks(value: Tensor) -> bool:
    """Whether torch survives a hook on a value: not on a view after a write through another (pytorch #196459)."""
    return not (value._is_view() and value._version)


def _of_gradient(d: Draft, x: str) -> str:
    return d.pick(_LINEAR if d.setting.scaled else _LINEAR + _OTHERS).format(g="g", y=d.alike(x))


_LOSSES = ("{}.float().sum()", "{}.float().square().mean()", "{}.float().tanh().sum()")


@statement()
def gradient(d: Draft) -> None:
    """Of a leaf, or of any value where Dynamo traces it; else it breaks the graph.

    AOTAutograd's graphs have no second derivative, but of what is inside of one. Where it breaks the graph, an ambient
    autocast would cast the eager backward of what ran in float32, but no compiled one.
    """
    traced = d.setting.traced
    if d.setting.scaled or not d.place.grad or d.place.body or (d.setting.ambient and not traced):
        raise Unfit
    leaf = d.value(lambda v: v.requires_grad and (traced or not _is_made(v)))
    loss = d.let(d.pick(_LOSSES).format(d.value(_is_made)))
    twice = traced or d.setting.lowering == "eager"
    how = "create_graph=True" if twice and d.chance() else "retain_graph=True"
    with d.whole():
        if not traced:
            break_graph(d, "None")
        g = d.let(f"torch.autograd.grad({loss}, {leaf}, {how})[0]")
        d.let(f"{g} * {d.alike(g)}")
