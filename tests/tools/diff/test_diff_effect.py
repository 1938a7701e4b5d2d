"""``fxamp-diff --graph`` on graphs that the installed torch prints, on fxamp's dumps and on model files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import MODEL, defined

from fxamp.tools.diff.command import main

HEAD = """
extends = ["cpu-bfloat16.toml"]

[[rule]]
id = "head"
cast = "fp32"
modules = ["lm_head"]

[[rule]]
id = "products"
cast = "fp32"
ops = ["linear"]
args = { weight = { size = "<1024" } }
"""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    Path("model.py").write_text(MODEL)
    Path("head.toml").write_text(HEAD)


def effect(*arguments: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main([*arguments, "--format", "json"]) in (0, 1)
    graphs: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["graphs"]
    return graphs


def printed_by_dynamo() -> None:
    """What torch prints of the graph that Dynamo makes of the model."""
    model, inputs = defined("model.py")

    def keep(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        Path("graph.py").write_text(gm.print_readable(print_output=False, include_device=True))
        return gm.forward

    torch.compile(model, backend=keep)(*inputs)


def dumped_by_fxamp() -> None:
    model, inputs = defined("model.py")
    options = {"policy": "cpu-bfloat16", "lowering": "eager", "dump": "dumps"}
    torch.compile(model, backend="fxamp", options=options)(*inputs)


def check(graph: dict[str, Any], modules: bool) -> None:
    """The second linear layer alone is decided by ``head`` (or by its weight's size), and one cast is gone."""
    assert [(op["op"], op["dtype"], op["rule"]) for op in graph["ops"]] == [
        (
            "aten::linear.default",
            {"old": "bf16", "new": "f32"},
            {"old": "matrix-products", "new": "products"},
        )
    ]
    old, new = graph["totals"]["old"], graph["totals"]["new"]
    assert (old["ops_by_dtype"], new["ops_by_dtype"]) == ({"bf16": 4, "f32": 1}, {"bf16": 3, "f32": 2})
    # under the old policy: x, two weights, two biases to bfloat16, and the logits to float32; under the new one the
    # hidden values to float32 instead of the second layer's weight and bias and the logits
    sizes = {"x": 32 * 16, "weight": 64 * 16, "bias": 64, "weight 2": 8 * 64, "bias 2": 8, "logits": 32 * 8}
    assert (old["casts"], old["cast_bytes"]) == (6, 6 * sum(sizes.values()))
    assert (new["casts"], new["cast_bytes"]) == (4, 6 * (sizes["x"] + sizes["weight"] + sizes["bias"] + 32 * 64))
    assert graph["kept_for_backward"]["new"] > graph["kept_for_backward"]["old"] > 0
    if modules:
        assert [module["module"] for module in graph["modules"]] == ["", "lm_head"]
        parts = [module[side]["cast_bytes"] for module in graph["modules"] for side in ("old", "new")]
        assert parts == [6 * sizes["logits"], 0, 6 * (sizes["weight 2"] + sizes["bias 2"]), 6 * 32 * 64]


def test_a_model_file(capsys: pytest.CaptureFixture[str]) -> None:
    (graph,) = effect("cpu-bfloat16", "head.toml", "--graph", "model.py", capsys=capsys)
    check(graph, modules=True)
    assert graph["ops"][0]["source"].endswith("model.py:13")
    assert graph["ops"][0]["module"] == "lm_head"


def test_a_graph_that_torch_prints(capsys: pytest.CaptureFixture[str]) -> None:
    printed_by_dynamo()
    (graph,) = effect("cpu-bfloat16", "head.toml", "--graph", "graph.py", capsys=capsys)
    check(graph, modules=False)


def test_a_dump_of_fxamp_and_several_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    dumped_by_fxamp()
    (captured,) = Path("dumps").rglob("*captured*")
    two = effect("cpu-bfloat16", "head.toml", "--graph", str(captured), "--graph", "model.py", capsys=capsys)
    check(two[0], modules=True)
    assert two[0] | {"file": "", "graph": ""} == two[1] | {"file": "", "graph": ""}


def test_the_same_policies_have_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cpu-float16", "cpu-float16", "--graph", "model.py"]) == 0
    assert "0 ops with another dtype or cast" in capsys.readouterr().out


def test_policies_of_a_device_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    (graph,) = effect("cuda-float16", "cuda-float16-fast-norms", "--graph", "model.py", capsys=capsys)
    assert [(op["op"], op["dtype"]) for op in graph["ops"]] == [
        ("aten::layer_norm.default", {"old": "f32", "new": "f16"}),
        ("aten::relu.default", {"old": "f32", "new": "f16"}),
    ]


def test_a_policy_that_refuses_the_graph(capsys: pytest.CaptureFixture[str]) -> None:
    banned = '[[rule]]\nid = "no"\ncast = "banned"\nops = ["relu"]\nadvice = "Use gelu."\n'
    Path("banned.toml").write_text(f'extends = ["cpu-bfloat16.toml"]\n{banned}')
    for format in ("text", "markdown"):
        assert main(["cpu-bfloat16", "banned.toml", "--graph", "model.py", "--format", format]) == 1
        assert "the new policy refuses it: Use gelu." in capsys.readouterr().out.replace("\\_", "_")
    (graph,) = effect("cpu-bfloat16", "banned.toml", "--graph", "model.py", capsys=capsys)
    assert graph["refused"]["old"] is None
    assert graph["refused"]["new"].startswith("Use gelu.")


def test_text_and_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    main(["cpu-bfloat16", "head.toml", "--graph", "model.py"])
    text = capsys.readouterr().out
    for line in (
        "model.py: graph_0: 1 op with another dtype or cast",
        "linear_1  model.py:13  lm_head  linear  bf16    f32    matrix-products -> products",
        "lm_head  bf16 1         f32 1          2 -> 1  3.0 KiB -> 12.0 KiB",
        "ops                    bf16 4, f32 1 -> bf16 3, f32 2",
        "casts                  6 -> 4",
    ):
        assert line in text.splitlines()
    main(["cpu-bfloat16", "head.toml", "--graph", "model.py", "--format", "markdown"])
    lines = capsys.readouterr().out.splitlines()
    assert (
        "| `linear_1` | `model.py:13` | `lm_head` | `linear` | `bf16` | `f32` | `matrix-products -> products` |"
        in lines
    )
    assert "| casts | 6 | 4 |" in lines


@pytest.mark.parametrize(
    ("file", "message"),
    [("none.py", "none.py does not exist"), ("cut.py", "cut.py"), ("cuda.py", "cuda.py runs on 'cuda', and neither ")],
)
def test_mistakes(file: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed_by_dynamo()
    whole = Path("graph.py").read_text()
    Path("cut.py").write_text(whole[: whole.index("layer_norm(linear") + 20])
    Path("cuda.py").write_text(whole.replace("cpu", "cuda:0"))
    assert main(["cpu-bfloat16", "head.toml", "--graph", file]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"fxamp-diff: {message}"), err
    assert err.count("\n") == 1


def test_layers_that_change_alike_are_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model.py"
    layers = "torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(5)])"
    net = "class Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    net += f"        self.h = {layers}\n\n    def forward(self, x):\n        return self.h(x)\n"
    model.write_text(f"import torch\n\n\n{net}\nmodel, inputs = Net(), (torch.ones(4, 8),)\n")
    assert main(["cpu-bfloat16", "cpu-float16", "--graph", str(model)]) == 1
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines() if " h.*" in line or line.startswith("h.*")]
    assert [row[-4:] for row in rows if row[0] == "linear"] == [["bf16", "f16", "5", "matrix-products"]]
    assert "5 ops with another dtype or cast" in text
