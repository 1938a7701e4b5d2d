"""The inputs of a runnable graph, as ``load_args`` gives them."""

import pytest
import torch
from torch.utils._dtype_abbrs import dtype_abbrs

from fxamp.errors import ListingError
from fxamp.graph_text import Entry
from fxamp.graph_text.parse import parse_text


def inputs(*calls: str, params: str = "x") -> list[Entry]:
    """The inputs of a graph that takes ``params``, read by ``calls``."""
    text = (
        f"class Repro(torch.nn.Module):\n    def forward(self, {params}):\n        return ()\ndef load_args(reader):\n"
    )
    text += "".join(f"    {call}\n" for call in calls) + "load_args._version = 0\n"
    (listing,) = parse_text(text, "repro.py").graphs
    return [entry for entry in listing.entries if entry.kind == "placeholder"]


@pytest.mark.parametrize("dtype", [dtype for dtype in dtype_abbrs if not str(dtype).startswith("torch.bits")], ids=str)
def test_every_dtype_has_the_name_of_printed_graphs(dtype: torch.dtype) -> None:
    (x,) = inputs("buf0 = reader.storage(None, 8)", f"reader.tensor(buf0, (2,), dtype={dtype!r}, is_leaf=True)  # x")
    assert x.dtype == dtype_abbrs[dtype]


def test_sizes_devices_and_defaults() -> None:
    first, second, third = inputs(
        "buf0 = reader.storage('a1', 64, device=device(type='cuda', index=1), dtype_hint=torch.float16)",
        "reader.tensor(buf0, (s0, 4), (4, 1), dtype=torch.float16, is_leaf=True)  # x",
        "reader.tensor(buf0, (), requires_grad=True)  # y",
        "buf1 = reader.storage(None, 4*s0)",
        "reader.tensor(buf1, (2*s0,))  # z",
        params="x, y, z",
    )
    assert (str(first.values[0]), first.values[0].device) == ("f16[s0, 4]", "cuda:1")
    assert (str(second.values[0]), second.values[0].device) == ("f32[]", "cuda:1")
    assert (third.values[0].shape, third.values[0].device) == (("2 * s0",), "cpu")


def test_inputs_that_are_no_tensors_keep_their_place() -> None:
    entries = inputs(
        "reader.symint(4, expr='s77')  # a",
        "reader.symint(7)  # b",
        "reader.const('c')  # c, filtered out during compilation",
        "reader.unsupported('d')  # d",
        '"""',
        "reader.tensor(buf9, (1,))  # d[0]",
        '"""',
        "reader.generator('cpu', None)  # e",
        "reader.opaque('Name')  # f",
        "buf0 = reader.storage(None, 8)",
        "reader.tensor(buf0, (2,))  # g",
        params="a, b, c, d, e, f, g",
    )
    assert [entry.symbol for entry in entries] == ["s77", "7", "", "", "", "", ""]
    assert [len(entry.values) for entry in entries] == [0, 0, 0, 0, 0, 0, 1]


def test_inputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ListingError, match=r"^repro\.py:4: load_args reads 1 inputs, but forward takes 2$"):
        inputs("buf0 = reader.storage(None, 8)", "reader.tensor(buf0, (2,))  # x", params="x, y")
