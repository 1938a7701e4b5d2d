"""What autograd.Functions save and return: results and gradients of every input are those of eager autocast."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch._dynamo.external_utils
from support.checks.equality import assert_equal
from support.checks.exhaustive import each_once, exhaustive
from support.machines.lacks import needs_compiler, needs_gradients_of_one_tensor, needs_writes_in_functions
from support.oracles.like_autocast import assert_like_autocast, assert_rewritten_like_autocast, compile_with, leaf, run
from support.oracles.scaled_runs import assert_same_gradients, by_fxamp, by_torch
from support.programs.saving_functions import (
    Adjoint,
    Asks,
    CallsAnother,
    Coupling,
    Decorated,
    Entmax15,
    ReturnsAliases,
    ReturnsInput,
    ReturnsItsInput,
    ReturnsSaved,
    ReturnsView,
    Reversible,
    SavesDetached,
    SavesResult,
    SavesResultFirst,
    SavesTwoResults,
    SavesView,
    SetUp,
    Sparsemax,
    TakesMore,
    Unmaterialized,
    WithIndices,
    WritesInside,
)
from torch import Tensor
from torch.testing._internal.autograd_function_db import autograd_function_db
from torch.utils.checkpoint import checkpoint

from fxamp.errors import DoubleBackwardError

Program = Callable[[Tensor, Tensor], Any]
LOWERINGS = ("eager", "aot_eager")

ALONE = (
    CallsAnother, ReturnsItsInput, ReturnsSaved, ReturnsView, SavesDetached, SavesResult, SavesTwoResults, SavesView,
    Sparsemax, Unmaterialized, WithIndices, WritesInside,
)  # fmt: skip


def of_a_product(function: Any) -> Program:
    return lambda a, b: function.apply(a @ b)


def _region(a: Tensor, b: Tensor) -> Tensor:
    h = a @ b
    with torch.autocast("cpu", enabled=False):
        h = SavesResult.apply(h.float() @ b)
    return h @ a


def _off(a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return Decorated.apply(a @ b, b)


def _branch(a: Tensor, b: Tensor) -> Tensor:
    return torch.cond(a.sum() > 0, lambda x, y: SavesResult.apply(x @ y), lambda x, y: (y @ x).sin(), (a @ b, b + 1))


#: Programs whose gradients are autocast's bit for bit, under a named policy too.
PROGRAMS: dict[str, Program] = {function.__name__: of_a_product(function) for function in ALONE} | {
    "SavesResultFirst": lambda a, b: SavesResultFirst.apply(a @ b, b @ a),
    "Decorated": lambda a, b: Decorated.apply(a @ b, b + 1),
    "SetUp": lambda a, b: SetUp.apply(a @ b, 0.5),
    "Asks": lambda a, b: Asks.apply(a @ b, b @ a, (a + b) @ b),
    "Asks for one": lambda a, b: Asks.apply((a @ b).detach(), b @ a, (a @ a).detach()),
    "one result of two": lambda a, b: SavesTwoResults.apply(a @ b)[0],
    "Unmaterialized, one of two": lambda a, b: Unmaterialized.apply(a @ b)[1],
    "ReturnsInput": lambda a, b: ReturnsInput.apply(a @ b, 2.0),
    "TakesMore": lambda a, b: TakesMore.apply(a @ b, -1, ("a", "b")),
    "TakesMore, all": lambda a, b: TakesMore.apply(a @ b, 0, ("a", "b"), True, None),
    "Reversible": lambda a, b: Reversible.apply(a @ b, b @ a, b),
    "Coupling": lambda a, b: Coupling.apply(a @ b, (b @ a) * 0.1),
    "Adjoint": lambda a, b: Adjoint.apply(a @ b, b, 3),
    "twice in a row": lambda a, b: SavesResult.apply(SavesResult.apply(a @ b) @ b),
    "twice alike": lambda a, b: SavesResult.apply(a @ b) * SavesResult.apply(b @ a),
    "in a checkpoint": lambda a, b: checkpoint(
        lambda x, y: SavesResult.apply(x @ y) @ y, a @ b, b + 1, use_reentrant=False
    ),
    "in a cond": _branch,
    "in a region": _region,
    "in a region that is off": _off,
    "of a view": lambda a, b: SavesResult.apply((a @ b).t()) @ a,
    "without gradients": lambda a, b: SavesResult.apply((a @ b).detach()) @ b,
    "beside a transform": lambda a, b: SavesResult.apply(a @ b) + torch.vmap(lambda x: x * 2)(a),
}

#: Programs that are autocast's bit for bit where autocast is around the call: under a named policy Dynamo has baked
#: ``dtype=x.dtype`` as float32, or breaks the graph before the Function.
AROUND: dict[str, Program] = PROGRAMS | {
    "Entmax15": of_a_product(Entmax15),
    "Sparsemax, another dimension": lambda a, b: Sparsemax.apply(a @ b, 0),
    "one tensor twice": lambda a, b: (lambda h: SavesResultFirst.apply(h, h))(a @ b),
}


#: What a torch lacks for a program.
_LACKS = {"WritesInside": needs_writes_in_functions, "one tensor twice": needs_gradients_of_one_tensor}


def _names(programs: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=_LACKS[name]) if name in _LACKS else name for name in programs]


def _third(programs: Iterable[str], first: int) -> list[Any]:
    """All names; by default each third one runs, from ``first``."""
    return exhaustive(_names(programs), always=list(programs)[first::3])


@each_once("name, lowering", _third(PROGRAMS, 0), LOWERINGS)
def test_under_a_named_policy(name: str, lowering: str) -> None:
    assert_like_autocast(PROGRAMS[name], leaf(4, 4), leaf(4, 4), lowering=lowering)


@each_once("name, lowering", _third(AROUND, 1), LOWERINGS)
def test_under_an_ambient_autocast(name: str, lowering: str) -> None:
    assert_like_autocast(AROUND[name], leaf(4, 4), leaf(4, 4), lowering=lowering, around=True)


def test_results_that_share_memory() -> None:
    """Under AOTAutograd, torch itself drops the gradient of one of the two."""
    assert_like_autocast(of_a_product(ReturnsAliases), leaf(4, 4), leaf(4, 4), lowering="eager")


@each_once("name, lowering", ["SavesResult", "SavesTwoResults", "Decorated", "in a checkpoint", "SetUp"], LOWERINGS)
def test_with_a_scaler(name: str, lowering: str) -> None:
    def program(a: Tensor, b: Tensor) -> Any:
        return PROGRAMS[name](a * 0.3, b * 0.3)

    inputs = leaf(4, 4), leaf(4, 4)
    assert_same_gradients(by_fxamp(program, inputs, lowering), by_torch(program, inputs))


@pytest.mark.parametrize("name", _third(PROGRAMS, 2))
def test_rewritten(name: str) -> None:
    assert_rewritten_like_autocast(PROGRAMS[name], leaf(4, 4), leaf(4, 4), oracle=PROGRAMS[name])


#: Those of torch's database that Dynamo takes; it raises for a forward that returns an array of numpy.
DATABASE = [op for op in autograd_function_db if "NotComposable" not in op.name]


@pytest.mark.parametrize("op", exhaustive(DATABASE, always=DATABASE[::2]), ids=lambda op: op.name)
def test_functions_of_torchs_database(op: Any) -> None:
    for sample in op.sample_inputs("cpu", torch.float32, requires_grad=True):
        assert_like_autocast(lambda *inputs: op.op(*inputs, **sample.kwargs), sample.input, *sample.args)  # noqa: B023


TWICE = ("SavesResult", "Asks", "CallsAnother", "SetUp", "twice in a row")


def penalized(program: Program, autocast: bool) -> list[Tensor | None]:
    """The gradients of a penalty on the gradients."""
    a, b = leaf(4, 4), leaf(4, 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        result = program(a, b)
    gradients = torch.autograd.grad(result.float().sum(), (a, b), create_graph=True)
    torch.stack([gradient.float().square().sum() for gradient in gradients]).sum().backward()
    return [a.grad, b.grad]


@each_once("name, around", [*TWICE, "in a checkpoint", "beside a transform"], [False, True])
def test_a_second_backward_under_eager(name: str, around: bool) -> None:
    compiled = compile_with(PROGRAMS[name], "eager", policy="auto" if around else "cpu-bfloat16")
    for ours, theirs in zip(penalized(compiled, around), penalized(PROGRAMS[name], True), strict=True):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x * x


def test_a_function_that_is_once_differentiable_raises_in_a_second_backward_beside_others() -> None:
    def program(x: Tensor) -> Tensor:
        return Once.apply(x * 2).tanh() + x.sin()  # type: ignore[no-any-return,no-untyped-call]

    for call in (program, compile_with(program, "eager")):
        x = leaf(4)
        (gradient,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()


def test_a_hook_has_autocasts_second_derivatives_or_is_refused() -> None:
    """torch 2.11's Dynamo makes a Function of the hook."""

    def program(x: Tensor, w: Tensor) -> Tensor:
        h = (x @ w).tanh()
        h.register_hook(lambda gradient: gradient * 2)
        return h * h

    try:
        ours = penalized(compile_with(program, "eager"), False)
    except DoubleBackwardError as error:
        assert "hook" in str(error) and hasattr(torch._dynamo.external_utils, "_ApplyBackwardHook")
    else:
        assert_equal(ours, penalized(program, True))  # type: ignore[arg-type]


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize("name", _names(PROGRAMS))
def test_under_inductor(name: str) -> None:
    """Inductor rounds less often: no gradient is further from float32's than autocast's, but for one rounding."""
    inputs = leaf(4, 4), leaf(4, 4)
    _, ours = run(compile_with(PROGRAMS[name], "inductor"), inputs)
    (_, theirs), (_, exact) = run(PROGRAMS[name], inputs, torch.bfloat16), run(PROGRAMS[name], inputs)
    assert ours.keys() == theirs.keys()
    for key, value in exact.items():
        rounding = torch.finfo(torch.bfloat16).eps * value.abs().max()
        assert (ours[key] - value).abs().max() <= (theirs[key] - value).abs().max() + rounding, key
