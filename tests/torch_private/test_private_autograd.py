"""torch's autograd graph is as fxamp takes it to be."""

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fxamp import torch_private as private


class Doubled(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


def doubled(x: Tensor) -> Tensor:
    result: Tensor = Doubled.apply(x)  # type: ignore[no-untyped-call]
    return result


def test_a_running_backward_is_known() -> None:
    x = torch.ones(2, requires_grad=True)
    calls: list[tuple[Any, int, bool]] = []

    def look(_: Tensor) -> None:
        calls.append((private.running_node(), private.running_backward(), private.keeps_graph()))

    y = x * 2
    y.register_hook(look)
    assert private.running_node() is None and private.running_backward() == -1
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert [node is y.grad_fn for node, _, _ in calls] == [True, True]
    assert calls[1][1] == calls[0][1] + 1
    assert [keeps for _, _, keeps in calls] == [True, False]


def test_a_call_comes_after_all_nodes_of_a_backward() -> None:
    x, calls = torch.ones(2, requires_grad=True), list[str]()
    y = x * 2
    z = y.exp()
    y.register_hook(lambda _: calls.append("node"))  # type: ignore[no-untyped-call]
    z.register_hook(lambda _: private.after_backward(lambda: calls.append("after")))  # type: ignore[no-untyped-call]
    z.sum().backward()
    assert calls == ["node", "after"]
    assert private.made_before(z.grad_fn) > private.made_before(y.grad_fn)


def test_nodes_tell_what_they_are() -> None:
    x = torch.ones(2, requires_grad=True)
    node: Any = (x.half() * 2).grad_fn
    assert private.gradient_dtypes(node) == [torch.float16]
    assert private.function_of(node) is None and private.autocast_dtype_of(node) is None
    leaf = (x * 2).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert private.is_leaf(leaf) and not private.is_leaf(node)
    edges = torch.stack([x, x.half().float(), torch.ones(2)]).grad_fn.next_functions  # type: ignore[union-attr]
    assert private.inner_nodes(edges) == [edges[1][0]]


def test_a_view_that_was_made_under_no_grad_has_no_node() -> None:
    h = torch.ones(3, 2, requires_grad=True) * 2
    with torch.no_grad():
        part = h[0].fill_(1)
    with pytest.raises(RuntimeError, match="A view was created in no_grad mode"):
        _ = part.grad_fn
    assert private.grad_fn(part) is None and private.grad_fn(torch.ones(2)) is None
    assert private.grad_fn(h) is h.grad_fn is not None and private.grad_fn(h.neg()[1]).name() == "SelectBackward0"


def test_a_view_of_written_memory_gets_no_new_node() -> None:
    h = torch.ones(3, 2, requires_grad=True) * 2
    part = h[0]
    h.mul_(2)
    begun = (h * 1).grad_fn
    assert private.grad_fn(part) is h.grad_fn
    assert private.made_before(part.grad_fn) > private.made_before(begun)


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_the_autocast_of_a_function_is_found(dtype: torch.dtype | None) -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        node = doubled(x).grad_fn
    assert private.function_of(node) is Doubled
    assert private.autocast_dtype_of(node) is dtype
    assert not private.compiled_by_aot(Doubled)


def test_saved_tensors_hooks_see_nothing_inside() -> None:
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with private.without_saved_tensors_hooks():
            x.sin()
        assert packed == []
        x.sin()
    assert len(packed) == 1


class _Asking(torch.autograd.Function):
    """Tells, while its backward runs, whether ``.grad`` of its input is added to."""

    answers: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.leaf = x
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        _Asking.answers.append(private.accumulates(ctx.leaf))
        return gradient


def test_whether_a_backward_adds_to_grad() -> None:
    x, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    _Asking.answers.clear()

    def loss() -> torch.Tensor:
        return (_Asking.apply(x) * other).sum()  # type: ignore[no-any-return,no-untyped-call]

    loss().backward()
    loss().backward(inputs=[x])
    torch.autograd.grad(loss(), [x])
    assert _Asking.answers == [True, True, False]


def test_hooks_on_saved_tensors_are_known() -> None:
    def same(tensor: Tensor) -> Tensor:
        return tensor

    ask = private.inlines_saved_tensors_hooks
    graph = torch.fx.symbolic_trace(lambda tensor: tensor + 0)
    assert ask() is False
    with torch.autograd.graph.saved_tensors_hooks(same, same):
        assert ask() is False
    with torch.autograd.graph.saved_tensors_hooks(graph, graph):
        assert ask() is True
    assert ask() is False


def test_hooks_on_saved_tensors_are_called_where_torch_hides_them() -> None:
    x = torch.ones(2, requires_grad=True)
    seen: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    with private.without_saved_tensors_hooks():
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            x.exp()
        assert seen == []
        with (
            private.calling_saved_tensors_hooks(),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            x.exp()
        assert len(seen) == 1
