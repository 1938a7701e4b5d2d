"""torch.func transforms and forward-mode AD inside a compiled model; torch.func.vjp differentiates after its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from support.checks.exhaustive import each_once, exhaustive
from support.oracles.like_autocast import assert_like_autocast, compile_with, leaf
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

Program = Callable[[Tensor, Tensor], Tensor]


def _layer(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).tanh()


def _vjp(x: Tensor, w: Tensor) -> Tensor:
    y, pull = vjp(lambda v: _layer(v, w), x)
    return y.sum() + pull(y)[0]


def _vjp_of_products(x: Tensor, w: Tensor) -> Tensor:
    """Its input is a product, and a product reads its result."""
    return vjp(torch.exp, x @ w)[1](x)[0] @ w


def _vjp_with_more(x: Tensor, w: Tensor) -> Tensor:
    y, pull, more = vjp(lambda v: (_layer(v, w), v.sum()), x, has_aux=True)
    return pull(y)[0] + more


def _vjp_of_a_vjp(x: Tensor, w: Tensor) -> Tensor:
    def inner(v: Tensor) -> Tensor:
        y, pull = vjp(lambda u: _layer(u, w), v)
        return pull(y)[0]

    y, pull = vjp(inner, x)
    return y + pull(x)[0]


def _vjp_of_a_batch(x: Tensor, w: Tensor) -> Tensor:
    y, pull = vjp(lambda v: _layer(v, w), x)
    return vmap(pull)(torch.stack([y, y * 2]))[0].sum(0)


def _vjp_without_gradients(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        y, pull = vjp(lambda v: _layer(v, w), x)
        gradient = pull(y)[0]
    return gradient + x @ w


def _vjp_after_a_break(x: Tensor, w: Tensor) -> Tensor:
    y, pull = vjp(lambda v: _layer(v, w), x)
    torch._dynamo.graph_break()
    gradient: Tensor = pull(y)[0]
    return gradient


def _branches(x: Tensor, w: Tensor) -> Tensor:
    def choose(v: Tensor) -> Tensor:
        return torch.cond(v.sum() > 0, lambda u: u @ w, lambda u: u @ w.detach(), (v,))

    return vmap(choose)(x)


def _forward_mode(x: Tensor, w: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(_layer(forward_ad.make_dual(x, x * 2), w)).tangent.exp()


PROGRAMS: dict[str, Program] = {
    "vjp": _vjp,
    "vjp, of products": _vjp_of_products,
    "vjp, with more": _vjp_with_more,
    "vjp of a vjp": _vjp_of_a_vjp,
    "vjp, of a batch": _vjp_of_a_batch,
    "vjp, without gradients": _vjp_without_gradients,
    "vjp, of the weight": lambda x, w: vjp(lambda v: _layer(x, v), w)[1](x)[0],
    "grad": lambda x, w: grad(lambda v: _layer(v, w).sum())(x),
    "jvp": lambda x, w: sum(jvp(lambda v: _layer(v, w), (x,), (x * 2,))),
    "jacrev": lambda x, w: jacrev(lambda v: _layer(v, w))(x).sum((0, 1)),
    "jacfwd": lambda x, w: jacfwd(lambda v: _layer(v, w))(x).sum((0, 1)),
    "hessian": lambda x, w: hessian(lambda v: _layer(v, w).sum())(x).sum((0, 1)),
    "gradients of samples": lambda x, w: vmap(grad(lambda v: _layer(v, w).sum()))(x),
    "branches": _branches,
    "forward mode": _forward_mode,
}


@each_once("name, lowering", exhaustive(PROGRAMS, always=list(PROGRAMS)[::2]), ["eager", "aot_eager"])
def test_under_an_ambient_autocast(name: str, lowering: str) -> None:
    assert_like_autocast(PROGRAMS[name], leaf(4, 4), leaf(4, 4), lowering=lowering, around=True)


def test_a_graph_break_before_the_gradient() -> None:
    """AOTAutograd raises: an input of its second graph is a wrapped value."""
    assert_like_autocast(_vjp_after_a_break, leaf(4, 4), leaf(4, 4), lowering="eager", around=True)


@pytest.mark.parametrize(
    "name", ["vjp", "vjp of a vjp", "vjp, of a batch", "vjp, of the weight", "branches", "forward mode"]
)
def test_under_a_named_policy_everything_inside_is_float32(name: str) -> None:
    def run(call: Any) -> list[Tensor]:
        x, w = leaf(4, 4), leaf(4, 4)
        result = call(x, w)
        return [result, *torch.autograd.grad(result.sum(), (x, w))]

    ours = run(compile_with(PROGRAMS[name], "eager", policy="cpu-bfloat16"))
    assert_equal(ours, run(PROGRAMS[name]))


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("name", ["vjp", "gradients of samples"])
def test_a_named_policy_that_casts_nothing_warns_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        compile_with(PROGRAMS[name], "eager", policy="auto")(leaf(4, 4), leaf(4, 4))
    compile_with(lambda x: vmap(torch.sin)(x), "eager")(torch.ones(2, 2))
    assert not _warnings(caplog)
    for _ in range(2):
        compile_with(PROGRAMS[name], "eager")(leaf(4, 4), leaf(4, 4))
    (message,) = _warnings(caplog)
    assert message.startswith("policy cpu-bfloat16: a compiled graph (with ") and "in torch.func transforms" in message


def test_a_loop_that_a_named_policy_casts_nothing_of_warns(caplog: pytest.LogCaptureFixture) -> None:
    compile_with(lambda x, w: torch._higher_order_ops.map(lambda v: v @ w, x), "eager")(leaf(2, 4, 4), leaf(4, 4))
    (message,) = _warnings(caplog)
    assert message.startswith("policy cpu-bfloat16: a compiled graph (with map_impl) trains in float32")
