"""Ops of torch's own database of samples, after a matrix product, as eager autocast runs them: results and gradients.

Torch's own "aot_eager" under autocast is the control: it says what any compiler changes, and what Dynamo cannot trace.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

pytest.importorskip("expecttest", reason="torch's database of ops is a part of its tests, which import it")

pytestmark = [pytest.mark.exhaustive, pytest.mark.filterwarnings("ignore")]  # the samples are torch's

#: One in this many ops is run; other numbers run others.
STRIDE, FIRST = 13, 3
#: Ops that draw random numbers in the dtype that was captured.
_RANDOM = {"cauchy", "exponential", "geometric", "log_normal", "normal", "uniform", "rand_like", "randn_like"}
#: And ops whose 16-bit kernel loses digits that fxamp keeps, that return memory as it is, or whose Python code names
#: the dtype of its input, which is float32 as it is captured.
OTHERWISE = frozenset({"matrix_exp", "empty_permuted", "masked.cumprod"} | _RANDOM)

NAMED = {"policy": "cpu-bfloat16", "lowering": "aot_eager"}
AUTO = {"lowering": "aot_eager"}


@dataclass(frozen=True)
class Call:
    """A call of an op on a sample's arguments, whose float32 tensors have gone through a product before."""

    op: Callable[..., Any]
    arguments: Any

    def tensors(self) -> list[Tensor]:
        """New leaves with the values of the sample's tensors."""
        values = [leaf for leaf in pytree.tree_leaves(self.arguments) if isinstance(leaf, Tensor)]
        return [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in values]

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        rest = iter(tensors)
        place = lambda leaf: _multiplied(next(rest)) if isinstance(leaf, Tensor) else leaf  # noqa: E731
        args, kwargs = pytree.tree_map(place, self.arguments)
        return [leaf for leaf in pytree.tree_leaves(self.op(*args, **kwargs)) if isinstance(leaf, Tensor)]


def _multiplied(value: Tensor) -> Tensor:
    if value.dtype is not torch.float32 or value.layout is not torch.strided:
        return value
    return (value.reshape(-1, 1) @ torch.ones(1, 1)).reshape(value.shape)


@dataclass(frozen=True)
class Outcome:
    """What a call and the backward of its results leave: results, their ``requires_grad``, gradients, random state."""

    results: list[Tensor]
    needs_grad: list[bool]
    gradients: list[Tensor | None]
    random: Tensor

    def differences(self, other: "Outcome") -> list[str]:
        """What differs, by bits; dtypes of results may, as fxamp returns those that were captured."""
        pairs = {
            "result": list(zip(self.results, other.results, strict=True)),
            "gradient": list(zip(self.gradients, other.gradients, strict=True)),
            "random state": [(self.random, other.random)],
        }
        wrong = [f"{what} {i}" for what, two in pairs.items() for i, (a, b) in enumerate(two) if not _equal(a, b)]
        return wrong + ["requires_grad"] * (self.needs_grad != other.needs_grad)


def _equal(ours: Tensor | None, theirs: Tensor | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    if ours.shape != theirs.shape or ours.is_floating_point() != theirs.is_floating_point():
        return False
    return bool(torch.allclose(ours.to(theirs.dtype), theirs, rtol=0, atol=0, equal_nan=True))


def _run(call: Callable[..., list[Tensor]], tensors: list[Tensor], autocast: bool) -> Outcome:
    torch.manual_seed(0)
    region: AbstractContextManager[object] = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with region:
        results = call(*tensors)
    random = torch.get_rng_state()
    squares = [(result.abs() ** 2).float().sum() for result in results if result.requires_grad]
    if squares:
        torch.stack(squares).sum().backward()
    needs_grad = [result.requires_grad for result in results]
    return Outcome([result.detach() for result in results], needs_grad, [t.grad for t in tensors], random)


def _attempt(call: Call, autocast: bool, backend: str = "", **options: object) -> Outcome | Exception:
    torch._dynamo.reset()
    run = torch.compile(call.__call__, backend=backend, options=options or None, fullgraph=True) if backend else call
    try:
        return _run(run, call.tensors(), autocast)
    except Exception as error:  # the caller compares who raised
        return error


def _calls() -> list[tuple[str, Call]]:
    from torch.testing._internal.common_methods_invocations import op_db

    calls = []
    for info in sorted(op_db, key=lambda info: (info.name, info.variant_test_name))[FIRST::STRIDE]:
        if torch.float32 not in info.dtypes or info.name in OTHERWISE or info.name.startswith("jiterator"):
            continue
        sample = next(iter(info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd)), None)
        if sample is not None:
            arguments = (sample.input, *sample.args), sample.kwargs
            calls.append((f"{info.name}.{info.variant_test_name}", Call(info.op, arguments)))
    return calls


def _wrong(call: Call, options: dict[str, str], expected: Outcome | Exception) -> str | None:
    """Return what fxamp does otherwise than eager autocast, and than torch's "aot_eager"; None if neither traces it."""
    ours = _attempt(call, options is AUTO, "fxamp", **options)
    if isinstance(ours, Exception):
        return None if isinstance(_attempt(call, options is AUTO, "aot_eager"), Exception) else str(ours)
    if isinstance(expected, Exception) or not ours.differences(expected):
        return ""
    control = _attempt(call, True, "aot_eager")
    same = isinstance(control, Outcome) and not ours.differences(control)
    return "" if same else ", ".join(ours.differences(expected))


def test_ops_of_torch_s_database_run_as_under_autocast() -> None:
    compared, wrong = 0, []
    for name, call in _calls():
        expected = _attempt(call, True)
        for options in (NAMED, AUTO):
            problem = _wrong(call, options, expected)
            compared += problem is not None and isinstance(expected, Outcome)
            if problem:
                wrong.append(f"{name} {options}: {problem}")
    assert wrong == []
    assert compared > 50
