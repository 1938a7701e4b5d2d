"""The oracle of the backend's tests: the same program under eager torch.autocast, bit for bit."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

import fxamp
from support.checks.equality import assert_equal
from support.oracles.scaled_runs import fresh, named


def leaf(*shape: int) -> torch.Tensor:
    """The same random values each time, with a gradient."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


def leaves(value: Any) -> list[torch.Tensor]:
    """The floating-point tensors in a result."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def run(
    program: Callable[..., Any], inputs: tuple[Any, ...], autocast: torch.dtype | None = None
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Call ``program`` and go backward from the sum of its floating results, in float32.

    Returns the results and the gradients by name: of the program's parameters, and of ``inputs`` by position.
    """
    torch.manual_seed(7)
    inputs = fresh(inputs)
    if isinstance(program, torch.nn.Module):
        program.zero_grad()
    context = torch.autocast("cpu", autocast) if autocast else nullcontext()
    with context:
        results = leaves(program(*inputs))
    total = sum(result.float().square().sum() for result in results if result.requires_grad)
    if isinstance(total, torch.Tensor):
        total.backward()
    return [result.detach() for result in results], named(program, inputs)


def compile_with(program: Callable[..., Any], lowering: str = "eager", **options: Any) -> Callable[..., Any]:
    """A compiled copy of ``program``; the policy is cpu-bfloat16 unless given."""
    torch._dynamo.reset()
    settings = {"policy": "cpu-bfloat16", "lowering": lowering} | options
    if isinstance(program, torch.nn.Module):
        twin = copy.deepcopy(program)
        twin.compile(backend="fxamp", options=settings)
        return twin
    return torch.compile(program, backend="fxamp", options=settings)


def assert_like_autocast(
    program: Callable[..., Any],
    *inputs: Any,
    lowering: str = "eager",
    oracle: Callable[..., Any] | None = None,
    around: bool = False,
) -> None:
    """Results and all gradients through fxamp are those of eager autocast to bfloat16, bit for bit.

    ``oracle`` is what runs under eager autocast, ``program`` itself unless given. The results' dtypes may be wider:
    a compiled graph hands out the dtypes that it was captured with. ``around``: autocast is on around the compiled
    program too, which names no policy; the results' dtypes are the same then.
    """
    compiled = compile_with(program, lowering, **({"policy": "auto"} if around else {}))
    expected, expected_gradients = run(oracle or program, inputs, torch.bfloat16)
    results, gradients = run(compiled, inputs, torch.bfloat16 if around else None)
    assert not around or [result.dtype for result in results] == [result.dtype for result in expected]
    assert_equal(results, expected, check_dtype=False)
    assert_equal(gradients, expected_gradients)
    assert expected_gradients or not any(isinstance(v, torch.Tensor) and v.requires_grad for v in inputs)


def assert_rewritten_like_autocast(
    program: Callable[..., Any] | ExportedProgram, *inputs: torch.Tensor, oracle: Callable[..., Any]
) -> torch.fx.GraphModule:
    """Rewrite ``program`` for cpu-bfloat16; its results and all gradients are those of ``oracle`` under autocast.

    Results have autocast's dtypes. Returns the rewritten module.
    """
    rewritten = fxamp.rewrite(program, inputs, policy="cpu-bfloat16")
    (results, gradients), (expected, expected_gradients) = run(rewritten, inputs), run(oracle, inputs, torch.bfloat16)
    assert_equal(results, expected)
    assert_equal(gradients, expected_gradients)
    return rewritten
