"""``fx_graph_runnable.py`` as torch's own repro writer makes it: read without running it, run only if trusted."""

import io
from pathlib import Path

import pytest
import torch
from support.programs.show_dumps import rows
from torch._dynamo.repro.after_aot import save_graph_repro
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fxamp.errors import ListingError
from fxamp.tools.inputs.load import Request, load

INPUTS = (torch.randn(4, 4), torch.randn(4), torch.randn(2, 4, dtype=torch.bfloat16), torch.ones(2, 1).bool())


def _program(weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    y = torch.nn.functional.linear(x.float(), weight, bias).masked_fill(mask, float("-inf"))
    values, _ = y.softmax(-1).max(-1)
    return [values, x * 2]


def _runnable(folder: Path, gm: GraphModule) -> Path:
    text = io.StringIO()
    save_graph_repro(text, gm, INPUTS, "inductor", stable_output=True)
    file = folder / "fx_graph_runnable.py"
    file.write_text(text.getvalue())
    return file


@pytest.fixture
def traced() -> GraphModule:
    gm = make_fx(_program)(*INPUTS)
    assert isinstance(gm, GraphModule)
    return gm


@pytest.mark.parametrize("trust", [False, True], ids=["read", "run"])
def test_the_types_that_the_text_does_not_hold(trust: bool, traced: GraphModule, tmp_path: Path) -> None:
    (listing,) = load(str(_runnable(tmp_path, traced)), Request(trust=trust)).graphs
    types = {entry.name: [(value.dtype, value.shape) for value in entry.values] for entry in listing.entries}
    expected = {
        node.name: node.meta["val"] for node in traced.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)
    }
    short = {torch.float32: "f32", torch.bfloat16: "bf16", torch.int64: "i64", torch.bool: "b8"}
    for name, value in expected.items():
        assert types[name] == [(short[value.dtype], tuple(value.shape))]


@pytest.mark.parametrize("trust", [False, True], ids=["read", "run"])
def test_a_policy_decides_as_for_the_same_graph_with_annotations(
    trust: bool, traced: GraphModule, tmp_path: Path
) -> None:
    readable = tmp_path / "readable.txt"
    readable.write_text(traced.print_readable(print_output=False))
    expected = load(str(readable), Request(policy="cuda-float16")).graphs[0]
    (listing,) = load(str(_runnable(tmp_path, traced)), Request(policy="cuda-float16", trust=trust)).graphs
    assert rows(listing) == rows(expected)
    assert any(entry.is_cast for entry in listing.entries)


def test_it_runs_only_if_trusted(traced: GraphModule, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, marker = _runnable(tmp_path, traced), tmp_path / "executed"
    file.write_text(f"open({str(marker)!r}, 'w').close()\n" + file.read_text())
    for request in (Request(), Request(policy="cpu-bfloat16")):
        load(str(file), request)
    assert not marker.exists()
    assert capsys.readouterr().err == ""
    load(str(file), Request(trust=True))
    assert marker.exists()
    assert capsys.readouterr().err == f"fxamp-show: running {file}, because --trust was given\n"


def test_a_call_of_the_files_own_modules_needs_trust(traced: GraphModule, tmp_path: Path) -> None:
    file = _runnable(tmp_path, traced)
    text = file.read_text().replace("super().__init__()\n", "super().__init__()\n        self.one = Linear(4, 4)\n", 1)
    text = text.replace("torch.ops.aten.t.default(weight_1)", "self.one(weight_1)")
    assert "self.one(weight_1)" in text
    file.write_text(text)
    with pytest.raises(ListingError, match=r"t cannot be run .*; accepted with --trust, which runs the file"):
        load(str(file), Request())
    (listing,) = load(str(file), Request(trust=True)).graphs
    assert "aten::linear.default" in {entry.target for entry in listing.entries}


@pytest.mark.parametrize("trust", [False, True], ids=["read", "run"])
def test_a_backward_gets_no_policy(trust: bool, traced: GraphModule, tmp_path: Path) -> None:
    file = _runnable(tmp_path, traced)
    file.write_text(file.read_text().replace("x_1", "tangents_1"))
    with pytest.raises(ListingError, match="it is a backward, whose dtypes follow from its forward"):
        load(str(file), Request(policy="cpu-bfloat16", trust=trust))


def test_an_error_in_it_has_its_line(traced: GraphModule, tmp_path: Path) -> None:
    file = _runnable(tmp_path, traced)
    file.write_text("1 / 0\n" + file.read_text())
    with pytest.raises(ListingError, match=r"fx_graph_runnable\.py:1: ZeroDivisionError: division by zero"):
        load(str(file), Request(trust=True))
    file.write_text(file.read_text().replace("1 / 0\n", "").replace("mod = Repro()", "mod = 3"))
    with pytest.raises(ListingError, match="it defines no mod and load_args"):
        load(str(file), Request(trust=True))
