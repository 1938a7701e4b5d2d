"""The names of all operators that are registered."""

import torch

from fxamp.torch_private import operator_names


def test_names_are_those_of_the_dispatcher() -> None:
    names = operator_names()
    assert {"aten::mm.default", "aten::sum.dim_IntList", "higher_order::cond.default"} <= names
    packets = {name.removeprefix("aten::").partition(".")[0] for name in names if name.startswith("aten::l")}
    assert packets and all(hasattr(torch.ops.aten, packet) for packet in packets)
