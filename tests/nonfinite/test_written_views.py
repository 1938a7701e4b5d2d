"""Option "nonfinite" under lowering "eager" changes no gradient by a bit, although it reads the autograd graph."""

from collections.abc import Callable

import pytest
import torch
from support.checks.equality import assert_equal
from support.oracles.like_autocast import compile_with
from support.programs.small_models import Layer
from torch import Tensor

import fxamp


def _written_views(h: Tensor) -> list[Tensor]:
    v = h[:, :4]
    v.mul_(2)
    w = h.view(-1)
    w[3:5] = 7
    return [h.relu_(), v, w]


def _views_of_what_is_written(h: Tensor) -> list[Tensor]:
    v, w = h[:2], h.t()
    h.mul_(3)
    return [v, h, w, v.to(v.dtype)]


def _read_between(h: Tensor) -> list[Tensor]:
    v, w = h[:, 2:], h.view(2, -1)
    h.mul_(3)
    read = [h * 2, v.contiguous(), h + 1, w * 3]
    v.add_(1)
    return [w, *read, v]


@pytest.mark.parametrize("program", [_written_views, _views_of_what_is_written, _read_between])
@pytest.mark.parametrize("options", [{}, {"nonfinite": "raise"}])
def test_gradients_are_summed_in_the_order_of_eager_mode(
    program: Callable[[Tensor], list[Tensor]], options: dict[str, str]
) -> None:
    gradients = []
    for compiled in (False, True):
        torch.manual_seed(0)
        layer = Layer(8, program)
        model = compile_with(layer, "eager", policy="auto", **options) if compiled else layer
        x = torch.randn(4, 8, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            results = model(x)
        weights = [torch.linspace(-1, 1, value.numel()).view(value.shape) for value in results]
        sum((value.float() * weight).sum() for value, weight in zip(results, weights, strict=True)).backward()
        gradients.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    assert_equal(*gradients)


def test_the_backward_of_written_views_alone_is_watched() -> None:
    def program(x: Tensor) -> Tensor:
        h = (x * 0).abs().sqrt() * 1
        part = h[:2]
        h.mul_(2)
        return part

    compiled = compile_with(program, "eager", policy="auto", nonfinite="log")
    compiled(torch.ones(4, requires_grad=True)).sum().backward()
    (found,) = fxamp.report(compiled).nonfinite
    assert (found.op, found.gradients) == ("autograd::SqrtBackward0", ("x",))
    assert found.forward is not None and found.forward.target == "aten::sqrt.default"
