"""Graphs in torch's other wrappings: its log, its structured trace, its repro writer, Inductor's debug folder."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.repro.after_aot import generate_compiler_repro_string, save_graph_repro
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fxamp.errors import ListingError
from fxamp.graph import dtype_name
from fxamp.graph_text import Listing
from fxamp.graph_text.parse import parse_text, read_file

ROOT = Path(__file__).parents[2]
PROGRAM = """
import torch

def f(x, w):
    return torch.nn.functional.gelu(x @ w).sum()

x, w = torch.ones(3, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)
torch.compile(f, backend={backend!r})(x, w).backward()
"""


def run(folder: Path, backend: str, **environment: str) -> str:
    """Run the program in ``folder``; returns what it wrote to stderr."""
    (folder / "program.py").write_text(PROGRAM.format(backend=backend))
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), **environment}
    done = subprocess.run([sys.executable, "program.py"], cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def targets(listing: Listing) -> list[str]:
    return [entry.target for entry in listing.entries if entry.is_call]


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The log and the structured trace of one run."""
    folder = tmp_path_factory.mktemp("logged")
    log = run(
        folder, "aot_eager", TORCH_LOGS="graph_code,aot_graphs,aot_joint_graph", TORCH_TRACE=str(folder / "trace")
    )
    (trace,) = (folder / "trace").iterdir()
    return log, trace.read_text()


def check_four_graphs(dynamo: Listing, joint: Listing, forward: Listing, backward: Listing) -> None:
    assert targets(dynamo) == ["operator.matmul", "torch._C._nn.gelu", ".sum"]
    assert (dynamo.name, joint.name, forward.name) == ("GraphModule", "inner_f", "GraphModule")
    first = [entry for entry in dynamo.entries if entry.kind == "placeholder"]
    assert [(entry.name, str(entry.values[0])) for entry in first] == [("l_x_", "f32[3, 4]"), ("l_w_", "f32[4, 4]")]
    assert {"aten::mm.default", "aten::gelu.default"} <= set(targets(forward)) < set(targets(joint))
    assert "aten::gelu_backward.default" in targets(backward) and "aten::gelu.default" not in targets(backward)
    assert [entry.name for entry in backward.entries if entry.kind == "placeholder"][-1] == "tangents_1"
    for listing in (dynamo, forward, backward):
        sources = {entry.source.code for entry in listing.entries if entry.source is not None}
        assert sources == {"return torch.nn.functional.gelu(x @ w).sum()"}


@pytest.mark.exhaustive
def test_the_log(logged: tuple[str, str]) -> None:
    document = parse_text(logged[0], "log.txt")
    assert document.warnings == ()
    assert [listing.stage for listing in document.graphs] == ["", "joint", "forward", "backward"]
    check_four_graphs(*document.graphs)


@pytest.mark.exhaustive
def test_a_coloured_log_of_several_ranks(logged: tuple[str, str]) -> None:
    coloured = logged[0].replace("def forward", "\x1b[36mdef\x1b[0m forward").replace("aten", "\x1b[1maten\x1b[0m")
    ranked = "\n".join(f"[rank0]:{line}" if line[1:5].isdecimal() else line for line in coloured.split("\n"))
    assert ranked.count("[rank0]:V") > 10
    assert parse_text(ranked, "log.txt") == parse_text(logged[0], "log.txt")


@pytest.mark.exhaustive
def test_the_structured_trace(logged: tuple[str, str]) -> None:
    assert '{"dynamo_output_graph":' in logged[1]
    document = parse_text(logged[1], "dedicated_log.log")
    assert document.warnings == ()
    check_four_graphs(*document.graphs)


@pytest.mark.parametrize("prefix", ["<eval_with_key>.2 ", " /a b/c.py ", "", "  "])
def test_the_file_before_a_class(prefix: str) -> None:
    graph = f" {prefix}class inner(torch.nn.Module):\n    def forward(self, x):\n        return x\n"
    text = f"===== Joint graph 0 =====\n{graph}"
    (listing,) = parse_text(text, "log.txt").graphs
    assert (listing.name, listing.stage) == ("inner", "joint")


def test_a_class_in_a_comment_is_none() -> None:
    with pytest.raises(ListingError, match="holds no graph"):
        parse_text("# File: a.py class G(torch.nn.Module):\n'b.py class G(torch.nn.Module):'\n", "log.txt")


INPUTS = (torch.ones(4, 4), torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(2, 1).bool(), torch.ones(3).long())


def mixed(weight: torch.Tensor, x: torch.Tensor, mask: torch.Tensor, index: torch.Tensor) -> list[torch.Tensor]:
    y = torch.nn.functional.linear(x.float(), weight).masked_fill(mask, float("-inf"))
    return [y.softmax(-1), weight[index]]


@pytest.fixture(scope="module")
def traced() -> GraphModule:
    gm = make_fx(mixed)(*INPUTS)
    assert isinstance(gm, GraphModule)
    return gm


def check_runnable(listing: Listing, gm: GraphModule) -> None:
    inputs = [entry for entry in listing.entries if entry.kind == "placeholder"]
    assert [(e.values[0].dtype, e.values[0].shape, e.values[0].device) for e in inputs] == [
        (dtype_name(tensor.dtype), tuple(tensor.shape), "cpu") for tensor in INPUTS
    ]
    nodes: list[Node] = [node for node in gm.graph.nodes if node.op != "output"]
    assert [entry.name for entry in listing.entries if entry.kind != "output"] == [node.name for node in nodes]
    for node, entry in zip(nodes, listing.entries, strict=False):
        assert list(entry.inputs) == [source.name for source in node.all_input_nodes]


@pytest.mark.parametrize("stable", [False, True])
def test_a_repro(stable: bool, traced: GraphModule) -> None:
    text = io.StringIO()
    save_graph_repro(text, traced, INPUTS, "inductor", stable_output=stable)
    (listing,) = parse_text(text.getvalue(), "fx_graph_runnable.py").graphs
    check_runnable(listing, traced)


def test_a_repro_without_its_runner(traced: GraphModule) -> None:
    text = generate_compiler_repro_string(traced, INPUTS, stable_output=True)
    (listing,) = parse_text(text, "repro.py").graphs
    check_runnable(listing, traced)
    with pytest.raises(ListingError, match=r"repro\.py:\d+: load_args reads 3 inputs, but forward takes 4"):
        parse_text(
            "\n".join(
                line for line in text.split("\n") if "torch.bfloat16, is_leaf" not in line and "buf1" not in line
            ),
            "repro.py",
        )


@pytest.mark.inductor
@pytest.mark.exhaustive
def test_inductors_debug_folder(tmp_path: Path) -> None:
    run(tmp_path, "inductor", TORCH_COMPILE_DEBUG="1")
    files = {}
    for file in tmp_path.glob("torch_compile_debug/**/fx_graph_*.py"):
        (listing,) = read_file(str(file)).graphs
        direction = "backward" if "backward" in file.parent.name else "forward"
        files[file.stem.removeprefix("fx_graph_"), direction] = listing
    kinds = ("readable", "transformed", "runnable")
    assert set(files) == {(kind, way) for kind in kinds for way in ("forward", "backward")}
    for way in ("forward", "backward"):
        readable, transformed, runnable = (files[kind, way] for kind in kinds)
        assert len(targets(transformed)) >= 3 and targets(readable) == targets(runnable)
        first, second = (
            [str(entry.values[0]) for entry in listing.entries if entry.kind == "placeholder"]
            for listing in (readable, runnable)
        )
        assert first == second
        assert readable.stage == ("backward" if way == "backward" else "")
