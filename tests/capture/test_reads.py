"""A captured graph that would read a different value than the program is refused, whatever made the two values one."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from support.programs.saving_functions import SavesResult
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp import capture
from fxamp.capture.distinct_results import OwnResults
from fxamp.errors import CaptureError


def function(a: Tensor, b: Tensor) -> Tensor:
    return SavesResult.apply(a @ b)


def checkpointed(a: Tensor, b: Tensor) -> Tensor:
    return checkpoint(lambda x, y: x.sin() * y, a + 1, b + 1, use_reentrant=False)


def branches(a: Tensor, b: Tensor) -> Tensor:
    return torch.cond(a.sum() > 0, lambda x, y: x.sin() - y, lambda x, y: y.sin() - x, (a + 1, b + 1))


def nested(a: Tensor, b: Tensor) -> Tensor:
    return checkpoint(lambda x: SavesResult.apply(x @ x), a @ b, use_reentrant=False)


def returned(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return checkpoint(lambda x, y: (y, x + 1), a + 1, b + 1, use_reentrant=False)


PROGRAMS = (function, checkpointed, branches, nested, returned)


def one_tensor_for_each_node(arguments: Any, mode: Any) -> list[Any]:
    return [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in arguments]


def one_tensor_for_each_type(arguments: Any, mode: Any) -> list[Any]:
    made: dict[Any, Tensor] = {}
    values = one_tensor_for_each_node(arguments, mode)
    return [made.setdefault((v.dtype, v.shape), v) if isinstance(v, Tensor) else v for v in values]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("values", [one_tensor_for_each_node, one_tensor_for_each_type])
def test_two_inputs_of_a_body_that_are_one_tensor(
    program: Callable[..., Any], values: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    fxamp.rewrite(program, inputs, policy="cpu-bfloat16")
    if values is one_tensor_for_each_node and program not in (function, nested):
        return
    monkeypatch.setattr(capture, "_values", values)
    with pytest.raises(CaptureError, match="not the value that the program reads"):
        fxamp.rewrite(program, inputs, policy="cpu-bfloat16")


def product(a: Tensor, b: Tensor) -> Tensor:
    return a.to(torch.float64).exp() * b.to(torch.float64).cos()


def test_a_conversion_from_a_cache_that_belongs_to_another_value(monkeypatch: pytest.MonkeyPatch) -> None:
    aten_trace: Any = import_module("fxamp.capture.aten_trace")
    cached: dict[Any, Tensor] = {}

    def conversion(method: str, args: Any, kwargs: Any) -> Tensor | None:
        return cached.setdefault(args[0].fake_mode, args[0].to(torch.float64)) if method == "to" else None

    monkeypatch.setattr(aten_trace, "conversion", conversion)
    with pytest.raises(CaptureError, match="not the value that the program reads"):
        fxamp.rewrite(product, (torch.ones(2), torch.ones(2)), policy="cpu-bfloat16")


def test_an_op_that_the_tracer_records_with_another_value(monkeypatch: pytest.MonkeyPatch) -> None:
    own = OwnResults.__torch_dispatch__
    seen: dict[OwnResults, Any] = {}

    def dispatch(self: OwnResults, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = seen.setdefault(self, args) if func in (torch.ops.aten.exp.default, torch.ops.aten.cos.default) else args
        return own(self, func, types, read, kwargs)

    monkeypatch.setattr(OwnResults, "__torch_dispatch__", dispatch)
    with pytest.raises(CaptureError, match="not the value that the program reads"):
        fxamp.rewrite(product, (torch.ones(2), torch.ones(2)), policy="cpu-bfloat16")


def test_writes_views_and_calls_that_return_their_input_are_what_the_program_reads() -> None:
    def program(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        c = a.clone()
        view = c.view(-1)
        view.add_(1)
        c[0] = b[0]
        torch.mul(a, b, out=(d := torch.empty(4, 4)))
        e, f = torch.broadcast_tensors(d, b[0])
        kept = torch.nn.functional.dropout(b.contiguous().float(), 0.0)
        return c * kept, view.expand_as(view), e - f, a.view_as(b), d.mul_(2).t_()

    inputs = torch.randn(4, 4), torch.randn(4, 4)
    assert_equal(fxamp.rewrite(program, inputs, policy="cpu-bfloat16")(*inputs), program(*inputs))
