"""Option "nonfinite" and torch.func: a transform is measured as a whole, at the values that leave it."""

from collections.abc import Callable
from typing import Any

import torch
from support.checks.exhaustive import each_once, exhaustive
from support.oracles.like_autocast import compile_with
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves

import fxamp

EVEN = torch.tensor([False, True, False, True])


def _root(x: Tensor) -> Tensor:
    return (x * 0).abs().sqrt().sum()


#: Programs of a tensor, and what is found, if anything.
TRANSFORMED: dict[str, tuple[Callable[[Tensor], Any], str | None]] = {
    "grad": (lambda x: grad(_root)(x), "nan"),
    "grad that is read": (lambda x: grad(_root)(x) * x, "nan"),
    "vmap": (lambda x: vmap(lambda row: row / 0)(x), "inf"),
    "vmap of grad": (lambda x: vmap(grad(_root))(x), "nan"),
    "jvp": (lambda x: jvp(lambda y: y / 0, (x,), (x,)), "inf"),
    "vjp": (lambda x: vjp(lambda y: (y * 0).abs().sqrt(), x)[1](x), "nan"),
    "jacrev": (lambda x: jacrev(lambda y: (y * 0).abs().sqrt())(x), "nan"),
    "jacfwd": (lambda x: jacfwd(lambda y: (y * 0).abs().sqrt())(x), "nan"),
    "hessian": (lambda x: hessian(lambda y: (y * 0).abs().pow(1.5).sum())(x), "nan"),
    "a masked row in vmap": (lambda x: vmap(lambda row: row.masked_fill(EVEN | True, -torch.inf).softmax(0))(x), "nan"),
    "a mask in vmap": (lambda x: vmap(lambda row: row.masked_fill(EVEN, -torch.inf))(x)[1:], None),
    "a mask for vmap": (lambda x: vmap(lambda row: row + torch.zeros(4).masked_fill(EVEN, -torch.inf))(x), None),
    "finite in the end": (lambda x: vmap(lambda row: (row * 0).log())(x).exp(), None),
    "finite": (lambda x: (vmap(grad(lambda row: row.exp().sum()))(x), hessian(lambda y: y.pow(3).sum())(x)), None),
}


@each_once("case, lowering", exhaustive(TRANSFORMED, always=list(TRANSFORMED)[::2]), ["eager", "aot_eager"])
def test_a_transform_is_named_as_a_whole(case: str, lowering: str) -> None:
    program, value = TRANSFORMED[case]
    compiled = compile_with(lambda x: program(x), lowering, policy="auto", nonfinite="log")
    x = torch.ones(4, 4)
    for plain, result in zip(tree_leaves(program(x)), tree_leaves(compiled(x)), strict=True):
        torch.testing.assert_close(plain, result, equal_nan=True)
        assert plain.isfinite().all() or value or "mask" in case
    found = fxamp.report(compiled).nonfinite
    assert [one.value for one in found] == ([value] if value else [])
    if value and case != "vjp":  # whose gradients are computed outside
        source = found[0].source
        assert source is not None and source.file == __file__ and "lambda x:" in source.code
        read = [value.what for value in found[0].inputs]
        assert read == ["input"] or case in ("jacrev", "jacfwd", "hessian")  # which are several transforms
