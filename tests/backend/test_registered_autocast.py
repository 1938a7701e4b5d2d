"""Custom ops get the casts that their libraries have registered for autocast."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.checks.bench_graph import policy, workbench
from support.checks.equality import assert_equal
from support.checks.exhaustive import each_once
from support.oracles.like_autocast import assert_like_autocast, compile_with, leaf
from torch import Tensor
from torch.nn import functional as F

from fxamp.graph import op_name
from fxamp.passes.forward.annotate_rules import AnnotateRules
from fxamp.passes.shared.decision import decision
from fxamp.policy import Category, Policy, Rule

LIBRARY = "fxamp_registered"
SIX = ("first", "other", "third", "next", "last_but_one", "end")


@pytest.fixture(autouse=True, scope="module")
def _ops() -> Iterator[None]:
    """A product in 16 bits under autocast, one in float32, one with a kernel that casts one input, one without.

    ``function`` is the first with an autograd.Function for its gradient, ``of_list`` with both inputs in a list.
    ``mixed`` has a kernel that casts each input to a dtype of its own. ``total`` adds what a list has, and
    ``record`` writes to memory.
    """
    with torch.library._scoped_library(LIBRARY, "FRAGMENT") as library:
        for name in ("low", "wide", "half", "mixed", "none"):
            library.define(f"{name}(Tensor x, Tensor w) -> Tensor")
            library.impl(name, _product, "CompositeExplicitAutograd")
            torch.library.register_autograd(f"{LIBRARY}::{name}", _backward, setup_context=_save, lib=library)
        for device in ("cpu", "cuda"):
            torch.library.register_autocast(f"{LIBRARY}::low", device, torch.bfloat16, lib=library)
            torch.library.register_autocast(f"{LIBRARY}::wide", device, torch.float32, lib=library)
        library.impl("half", _cast_one, "AutocastCPU")
        library.impl("mixed", _cast_both, "AutocastCPU")
        library.define("function(Tensor x, Tensor w) -> Tensor")
        library.impl("function", _product, "CompositeExplicitAutograd")
        library.impl("function", lambda x, w: _Product.apply(x, w), "Autograd")
        library.define("of_list(Tensor[] xw) -> Tensor")
        library.impl("of_list", lambda xw: _product(*xw), "CompositeExplicitAutograd")
        torch.library.register_autograd(f"{LIBRARY}::of_list", _backward_of_list, setup_context=_save, lib=library)
        library.define("total(Tensor?[] parts) -> Tensor")
        library.impl("total", _total, "CompositeExplicitAutograd")
        library.define("record(Tensor x, Tensor(a!) sums) -> Tensor")
        library.impl("record", _record, "CompositeExplicitAutograd")
        library.define(f"six({', '.join(f'Tensor {name}' for name in SIX)}) -> Tensor")
        library.impl("six", lambda *parts: _total([*parts]), "CompositeExplicitAutograd")
        for name in ("function", "of_list", "total", "record", "six"):
            torch.library.register_autocast(f"{LIBRARY}::{name}", "cpu", torch.bfloat16, lib=library)
        yield


def _product(x: Tensor, w: Tensor) -> Tensor:
    return (x.float() @ w.float()).to(x.dtype)


def _total(parts: list[Tensor | None]) -> Tensor:
    given = [part for part in parts if part is not None]
    return torch.stack([part.double() for part in given]).sum(0).to(given[-1].dtype)


def _record(x: Tensor, sums: Tensor) -> Tensor:
    sums.add_((x * 100).sum(0).to(sums.dtype))
    return x * 2


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*(inputs[0] if len(inputs) == 1 else inputs))


def _backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors  # type: ignore[attr-defined]
    return (gradient.float() @ w.float().T).to(x.dtype), (x.float().T @ gradient.float()).to(w.dtype)


def _backward_of_list(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> list[Tensor]:
    return list(_backward(ctx, gradient))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        with torch._C._AutoDispatchBelowAutograd():
            product: Tensor = torch.ops.fxamp_registered.function(x, w)
            return product

    backward = staticmethod(_backward)


def _cast_one(x: Tensor, w: Tensor) -> Tensor:
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
        product: Tensor = torch.ops.fxamp_registered.half(x.float(), w)
        return product


def _cast_both(x: Tensor, w: Tensor) -> Tensor:
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
        product: Tensor = torch.ops.fxamp_registered.mixed(x.bfloat16(), w.half())
        return product


def _of_list(x: Tensor, w: Tensor) -> Tensor:
    product: Tensor = torch.ops.fxamp_registered.of_list([x, w])
    return product


def of_captured_inputs(x: Tensor, w: Tensor, op: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return op(op(x, w).float().sin(), w)


def of_products(x: Tensor, w: Tensor, op: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The weight is read under autocast's cache, too."""
    return F.linear(op(F.linear(x, w), w), w)


def in_no_region(x: Tensor, w: Tensor, op: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return op(x, w)


def of_a_value_read_twice(x: Tensor, w: Tensor, op: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    square = F.linear(x.T, x.T)
    return op(square, square).sin() + op(w, square).sin()


def of_a_product(x: Tensor, w: Tensor, op: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return op(x, F.linear(w, w))


def in_a_region(x: Tensor, w: Tensor, op: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return op(F.linear(x, w), w)


@each_once(
    "program, name, lowering",
    [of_captured_inputs, of_products, of_a_product, in_no_region],
    ["low", "wide", "half", "function"],
    ["eager", "aot_eager"],
)
def test_results_and_gradients_are_those_of_eager_autocast(
    program: Callable[..., Tensor], name: str, lowering: str
) -> None:
    op = getattr(torch.ops.fxamp_registered, name)
    x, w = leaf(4, 6), leaf(6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        expected = program(x, w, op)
    ours = compile_with(lambda x, w: program(x, w, op), lowering)(x, w)
    assert torch.equal(ours, expected.float())
    got, theirs = (torch.autograd.grad(result.float().square().sum(), (x, w)) for result in (ours, expected))
    assert_equal(got, theirs)


@pytest.mark.parametrize(("name", "cast"), [("low", "lower_precision_fp"), ("wide", "fp32"), ("none", None)])
def test_the_decision_names_its_source_on_a_machine_without_the_device(name: str, cast: str | None) -> None:
    bench = workbench(
        lambda a: getattr(torch.ops.fxamp_registered, name)(a, a), torch.ones(2, 2), under=Policy.load("cuda-bfloat16")
    )
    bench.context = replace(bench.context, every_device=True)
    bench.run(AnnotateRules())
    assert bench.run(AnnotateRules()).modified == 0
    (choice,) = (decision(n) for n in bench.captured.module.graph.nodes if op_name(n).startswith(LIBRARY))
    assert choice is not None
    assert (choice.rule and choice.rule.cast) == cast and ("library" in choice.reason) == (cast is not None)


def test_the_casts_of_a_kernel_are_in_the_order_of_the_arguments() -> None:
    """The order of casts decides how the gradients of a value that is read several times are summed."""
    bench = workbench(lambda a: torch.ops.fxamp_registered.six(*[a] * 6), torch.ones(2, 2), under=policy())
    bench.run(AnnotateRules())
    (choice,) = (decision(n) for n in bench.captured.module.graph.nodes if op_name(n).startswith(LIBRARY))
    assert choice is not None and choice.kernel == tuple((name, torch.bfloat16) for name in SIX)


def test_a_rule_of_the_policy_comes_first_and_unlisted_last() -> None:
    rules = policy(Rule("own", Category.FP32, (f"{LIBRARY}::low",)))
    bench = workbench(
        lambda a: (torch.ops.fxamp_registered.low(a, a), torch.ops.fxamp_registered.none(a, a)),
        torch.ones(2, 2),
        under=rules,
    )
    bench.run(AnnotateRules())
    choices = {op_name(n): decision(n) for n in bench.captured.module.graph.nodes if op_name(n).startswith(LIBRARY)}
    assert {name: choice and choice.rule and choice.rule.id for name, choice in choices.items()} == {
        f"{LIBRARY}::low.default": "own",
        f"{LIBRARY}::none.default": None,
    }


@each_once(
    "program, name, lowering",
    [of_captured_inputs, of_products, of_a_product, of_a_value_read_twice, in_a_region],
    ["low", "mixed", "function", "of_list", "half"],
    ["eager", "aot_eager"],
)
def test_a_cast_to_a_dtype_that_the_policy_lacks(program: Callable[..., Tensor], name: str, lowering: str) -> None:
    op = _of_list if name == "of_list" else getattr(torch.ops.fxamp_registered, name)
    x, w = leaf(4, 6), leaf(6, 6)
    with torch.autocast("cpu", torch.float16):
        expected = program(x, w, op)
    ours = compile_with(lambda x, w: program(x, w, op), lowering, policy="cpu-float16")(x, w)
    assert torch.equal(ours, expected.float())
    got, theirs = (torch.autograd.grad(result.float().square().sum(), (x, w)) for result in (ours, expected))
    assert_equal(got, theirs)


@pytest.mark.parametrize("first", [None, torch.arange(4), torch.ones(4, dtype=torch.float64)])
def test_a_list_may_begin_with_what_autocast_does_not_cast(first: Tensor | None) -> None:
    total = torch.ops.fxamp_registered.total
    x = torch.rand(4)
    with torch.autocast("cpu", torch.bfloat16):
        expected = total([first, x])
    assert not torch.equal(expected.float(), total([first, x]))
    for lowering in ("eager", "aot_eager"):
        assert torch.equal(compile_with(lambda x: total([first, x]), lowering)(x), expected.float())


@pytest.mark.parametrize("around", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bfloat16])
def test_an_op_that_writes_to_memory_reads_casts(dtype: torch.dtype, around: bool) -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        sums = torch.zeros(6, dtype=dtype)
        return torch.ops.fxamp_registered.record(x, sums), sums.double()

    for lowering in ("eager", "aot_eager"):
        assert_like_autocast(program, leaf(4, 6).detach(), lowering=lowering, around=around)


def test_what_an_op_writes_to_memory_that_autocast_would_cast_arrives() -> None:
    def program(x: Tensor) -> Tensor:
        sums = torch.zeros(6)
        return torch.ops.fxamp_registered.record(x, sums) + sums

    x = leaf(4, 6).detach()
    assert torch.equal(compile_with(program)(x), program(x))
