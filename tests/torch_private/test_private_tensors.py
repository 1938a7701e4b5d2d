"""The comparison of many tensors in C++ sees what fxamp relies on."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._library.fake_class_registry import FakeScriptObject

from fxamp import torch_private as private

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "class": lambda x: nn.Parameter(x, requires_grad=False),
    "dtype": lambda x: x.double(),
    "device": lambda x: x.to("meta"),
    "sizes": lambda x: x[:2],
    "strides": lambda x: x.t(),
    "layout": lambda x: x.to_sparse(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_a_comparison_sees_every_property(change: Callable[[Tensor], Tensor]) -> None:
    first, second = torch.ones(3, 3), torch.ones(())
    equal = private.comparison_with([first, second])
    assert equal(first, second)
    assert equal(torch.zeros(3, 3), torch.zeros(()))
    assert not equal(change(torch.ones(3, 3)), second)


def test_a_comparison_sees_what_a_parameter_became() -> None:
    parameter = nn.Parameter(torch.ones(3, 3))
    equal = private.comparison_with([parameter])
    parameter.data = torch.zeros(3, 3)
    assert equal(parameter)
    parameter.data = torch.zeros(3, 3).t()
    assert not equal(parameter)


def test_a_comparison_takes_as_many_tensors() -> None:
    equal = private.comparison_with([torch.ones(2)])
    with pytest.raises(TypeError):
        equal(torch.ones(2), torch.ones(2))
    assert private.comparison_with([])()


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_lstm_runs_where_onednn_computes(dtype: torch.dtype, gradients: bool) -> None:
    """Elsewhere its kernel raises, or torch takes another."""
    layer, x = nn.LSTM(4, 4), torch.randn(2, 3, 4)
    with torch.set_grad_enabled(gradients), torch.autocast("cpu", dtype):
        if private.onednn_computes(dtype):
            assert layer(x)[0].dtype is dtype
        else:
            with pytest.raises(RuntimeError, match="primitive"):
                layer(x)


def test_what_stands_for_an_object_gives_it_back() -> None:
    mesh = object
    assert private.real_object(FakeScriptObject(mesh, "Mesh", mesh)) is mesh  # type: ignore[arg-type]
    assert private.real_object(mesh) is mesh


def test_a_wrapped_tensor_gives_the_one_inside_of_all_transforms() -> None:
    x, seen = torch.ones(2, 3), []

    def inner(row: Tensor) -> Tensor:
        seen.append((row.shape, private.outside_transforms(row)))
        return row.sum()

    torch.vmap(torch.func.grad(inner))(x)
    assert [(tuple(shape), tuple(inside.shape)) for shape, inside in seen] == [((3,), (2, 3))]
    assert private.outside_transforms(x) is x


def test_versions_are_set_for_each_tensor_and_its_views() -> None:
    first, second = torch.zeros(2), torch.zeros(3)
    view = first[:1]
    private.set_version([first, second], 1000)
    assert [tensor._version for tensor in (first, second, view)] == [1000, 1000, 1000]
    second.add_(1)
    assert (first._version, second._version) == (1000, 1001)


@pytest.mark.parametrize("opened", [1, 2, 3])
def test_transforms_that_an_exception_leaves_open_are_closed(opened: int) -> None:
    functorch = torch._C._functorch

    def inside(x: Tensor) -> Tensor:
        level = functorch.maybe_current_level()
        opens = [lambda: functorch._vmap_increment_nesting(2, "error"), functorch._grad_increment_nesting]
        with pytest.raises(ZeroDivisionError), private.transforms_closed():
            for open_one in [*opens, functorch._jvp_increment_nesting][:opened]:
                open_one()
            raise ZeroDivisionError
        assert functorch.maybe_current_level() == level
        return x + 1

    assert torch.equal(torch.vmap(inside)(torch.zeros(2)), torch.ones(2))
