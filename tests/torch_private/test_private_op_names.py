"""The names of all operators that are registered."""

import torch

from fxamp.torch_private import has_autocast_kernel, operator_names


def test_names_are_those_of_the_dispatcher() -> None:
    names = operator_names()
    assert {"aten::mm.default", "aten::sum.dim_IntList", "higher_order::cond.default"} <= names
    packets = {name.removeprefix("aten::").partition(".")[0] for name in names if name.startswith("aten::l")}
    assert packets and all(hasattr(torch.ops.aten, packet) for packet in packets)


def test_autocast_has_kernels_for_what_a_library_registers() -> None:
    with torch.library._scoped_library("fxamp_names", "FRAGMENT") as library:
        for name in ("plain", "cast"):
            library.define(f"{name}(Tensor x) -> Tensor")
        torch.library.register_autocast("fxamp_names::cast", "cpu", torch.bfloat16, lib=library)
        ops = torch.ops.fxamp_names
        assert has_autocast_kernel(ops.cast.default, "cpu") and not has_autocast_kernel(ops.cast.default, "cuda")
        assert not has_autocast_kernel(ops.plain.default, "cpu")
    assert has_autocast_kernel(torch.ops.aten.sum.dim_IntList, "cuda")
    assert not has_autocast_kernel(torch.ops.aten.relu.default, "cpu")
