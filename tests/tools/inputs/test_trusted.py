"""Which functions the text of a graph may name."""

import operator

import pytest
import torch

from fxamp.tools.inputs import trusted


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("torch.ops.aten.mm.default", torch.ops.aten.mm.default),
        ("torch.ops.aten.einsum.default", torch.ops.aten.einsum.default),
        ("torch.ops.higher_order.cond", torch.ops.higher_order.cond),
        ("torch.conv2d", torch.conv2d),
        ("torch.functional.einsum", torch.functional.einsum),
        ("torch._C._nn.linear", torch._C._nn.linear),
        ("torch._C._nn.scaled_dot_product_attention", torch._C._nn.scaled_dot_product_attention),
        ("torch.nn.functional.batch_norm", torch.nn.functional.batch_norm),
        ("torch.arange", torch.arange),
        ("torch.sym_max", torch.sym_max),
        ("operator.matmul", operator.matmul),
        ("torch.amp.autocast_mode._enter_autocast", torch.amp.autocast_mode._enter_autocast),
    ],
)
def test_what_graphs_call_is_found(path: str, expected: object) -> None:
    assert trusted.function(path) is expected


@pytest.mark.parametrize(
    "path",
    [
        "os.system",
        "eval",
        "builtins.exec",
        "builtins.getattr",
        "operator.call",
        "operator.methodcaller",
        "operator.attrgetter",
        "torch.load",
        "torch.save",
        "torch.hub.load",
        "torch.from_file",
        "torch.compile",
        "torch.ops.load_library",
        "torch.ops.aten.from_file.default",
        "torch.ops.aten.from_file",
        "torch.ops.aten.save.default",
        "torch.ops.aten.save",
        "torch.ops.aten._print.default",
        "torch.ops.debugprims.load_tensor.default",
        "torch.ops.aten.__class__.mro",
        "torch.ops.__class__.__init__",
        "torch.nn.functional.torch",
        "torch.utils.cpp_extension.load_inline",
        "torch.Tensor.numpy",
        "torch.Tensor.__reduce_ex__",
        "torch.distributed.init_process_group",
    ],
)
def test_what_reaches_outside_is_not(path: str) -> None:
    assert trusted.function(path) is None


@pytest.mark.parametrize("name", ["numpy", "data_ptr", "apply_", "register_hook", "__class__", "__reduce__", "_make"])
def test_methods_that_reach_outside(name: str) -> None:
    assert not trusted.is_method(name)


@pytest.mark.parametrize("name", ["view", "add_", "to", "item", "__rsub__", "new_zeros", "size"])
def test_methods_of_graphs(name: str) -> None:
    assert trusted.is_method(name)


def test_no_operator_with_a_file_is_allowed() -> None:
    with torch.library._scoped_library("fxamp_show_test", "DEF") as library:
        library.define("reads(Tensor x, str filename) -> Tensor")
        library.define("plain(Tensor x, str mode) -> Tensor")
        assert trusted.function("torch.ops.fxamp_show_test.plain.default") is not None
        assert trusted.function("torch.ops.fxamp_show_test.reads.default") is None
        assert trusted.function("torch.ops.fxamp_show_test.reads") is None
