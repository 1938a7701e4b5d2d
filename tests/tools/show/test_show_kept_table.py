"""The table of kept values: of a dump and of a model, in every format, and the order of ``--kept``."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxamp
from fxamp.tools.show.command import main

POLICY = """
extends = ["cpu-bfloat16"]

[[rule]]
id = "large"
keep = "int8"
region = "kept"
elements = ">=1024"
why = "Half the memory."

[[rule]]
id = "again"
keep = "recompute"
region = "kept"
ops = ["gelu"]
why = "It is cheap."
"""


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The forward's file of a program under the policy, and what the report says."""
    folder = tmp_path_factory.mktemp("dump")
    (folder / "mine.toml").write_text(POLICY)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    options = {"policy": str(folder / "mine.toml"), "lowering": "aot_eager", "dump": str(folder)}
    compiled = torch.compile(lambda x: model(x * 2).float().pow(2).mean(), backend="fxamp", options=options)
    compiled(torch.randn(64, 32)).backward()
    return str(folder / "graph_0_forward.py"), str(fxamp.report(compiled))


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments]) == 0
    return capsys.readouterr().out


def test_the_largest_come_first_with_their_rules_and_totals(
    dump: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, dump[0], "--kept", "--width", "200")
    table = text.splitlines()[text.splitlines().index("") + 3 :]
    assert re.match(r"\S+ +addmm +\S* +64x64 +bf16 +int8/64 +8.0 KiB +4.1 KiB +large +Half the memory.", table[0]), text
    assert any(re.search(r"gelu .* recompute +0 B +0 B +again +It is cheap.", line) for line in table)
    last = text.splitlines()[-1]
    assert last.startswith("kept for the backward  ") and "before" in last
    whole = shown(capsys, dump[0], "--width", "200")
    assert "int8/64" in whole and whole.index("addmm") < whole.index("int8/64")


def test_every_format_has_them(dump: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    (graph,) = json.loads(shown(capsys, dump[0], "--format", "json"))["graphs"]
    packed = [value for value in graph["kept"] if value["form"] == "int8/64"]
    assert packed and packed[0]["rule"]["id"] == "large" and packed[0]["before"] == 2 * packed[0]["after"] - 256
    assert graph["kept_after"] == sum(value["after"] for value in graph["kept"]) < graph["kept_before"]
    page = shown(capsys, dump[0], "--format", "html")
    assert '"int8/64"' in page and "keptText" in page


def test_the_report_has_the_total(dump: tuple[str, str]) -> None:
    assert re.search(r"Kept for the backward: [\d.]+ KiB without rules for it, [\d.]+ KiB with them\.", dump[1])
    assert dump[1].splitlines()[0].split()[-1] == "kept"


def test_unknown_facts_are_reported_as_unknown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "graph.py"
    path.write_text("class G(torch.nn.Module):\n    def forward(self, x):\n        return (x,)\n")
    assert "no values kept for a backward are known here" in shown(capsys, str(path), "--kept")


MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)

    def forward(self, x):
        return self.down(self.act(self.up(x * 2))).float().pow(2).mean()

torch.manual_seed(0)
model, inputs = Net(), (torch.randn(64, 32),)
"""


@pytest.fixture
def net(tmp_path: Path) -> tuple[str, str]:
    """A model file, and the path of the policy above."""
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "mine.toml").write_text(POLICY)
    return str(tmp_path / "net.py"), str(tmp_path / "mine.toml")


def test_a_model_has_the_table_too(net: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, net[0], "--policy", net[1], "--kept", "--width", "200")
    assert re.search(r"addmm +addmm +up +64x64 +bf16 +int8/64 +8.0 KiB +4.1 KiB +large +Half the memory.", text), text
    assert re.search(r"gelu +act +64x64 +bf16 +recompute +0 B +0 B +again +It is cheap.", text), text
    whole = shown(capsys, net[0], "--policy", net[1], "--width", "200")
    assert text.splitlines()[-1] in whole, "a policy with such rules shows what they do"
    page = shown(capsys, net[0], "--policy", net[1], "--format", "html")
    assert '"int8/64"' in page


def test_without_rules_it_is_there_where_it_is_asked_for(
    net: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, net[0], "--policy", "cuda-bfloat16", "--kept", "--width", "200")
    assert re.search(r"addmm +addmm +up +64x64 +bf16 +bf16 +8.0 KiB +8.0 KiB", text), text
    before, after = re.findall(r"[\d.]+ KiB", text.splitlines()[-1])
    assert before == after
    assert "kept as" not in shown(capsys, net[0], "--policy", "cuda-bfloat16", "--width", "200")


IMAGES = """
import torch
from torch import nn

model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 4, 3))
inputs = (torch.randn(2, 3, 12, 12),)
"""


def test_a_model_with_pooling_has_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "images.py").write_text(IMAGES)
    lean = shown(capsys, str(tmp_path / "images.py"), "--policy", "cuda-bfloat16-lean", "--kept", "--width", "200")
    assert re.search(r"convolution +0 +2x64x10x10 +bf16 +int8/64", lean)
    assert re.search(r"max_pool2d\S* +3 +2x64x5x5 +bf16 +bf16", lean), "it is small"


@pytest.mark.exhaustive
@pytest.mark.inductor
def test_the_table_of_a_model_is_that_of_its_compilation(
    net: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    (graph,) = json.loads(shown(capsys, net[0], "--policy", net[1], "--format", "json"))["graphs"]
    scope: dict[str, Any] = {}
    exec(MODEL, scope)
    torch._dynamo.reset()
    compiled = torch.compile(scope["model"], backend="fxamp", options={"policy": net[1]})
    compiled(*scope["inputs"]).backward()
    expected = [(v.op, v.module, v.dtype, v.form, v.before, v.after) for v in fxamp.report(compiled).graphs[0].kept]
    keys = ("op", "module", "dtype", "form", "before", "after")
    assert expected and [tuple(value.get(key, "") for key in keys) for value in graph["kept"]] == expected
