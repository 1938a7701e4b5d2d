"""fxamp-policy: check, show, explain."""

import json
import re
from pathlib import Path

import pytest
from policy_runs import run

from fxamp.policy import Policy
from fxamp.policy.file.shipped import built_in_names, variant_names

ROOT = Path(__file__).parents[3]

MINE = """
extends = ["cpu-bfloat16"]
unlisted = "promote"
[match]
cpu_features = ["avx2"]
[[rule]]
id = "big-sums"
cast = "fp32"
ops = ["sum.dim_IntList", "mean"]
reduces = ">4096"
why = "Many small values."
[[rule]]
id = "last-sums"
cast = "fp32"
ops = ["sum"]
[rule.args]
dim = -1
self = { size = ">100", dtype = "float32" }
[[rule]]
id = "head"
cast = "fp32"
modules = ["head"]
region = "both"
[rule.inputs]
weight = "follow"
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    return str(path)


def test_check_lists_all_mistakes_of_all_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], mine: str) -> None:
    bad, worse = tmp_path / "bad.toml", tmp_path / "worse.toml"
    bad.write_text(MINE.replace("reduces", "reduce").replace('"follow"', '"fp23"'))
    worse.write_text('extends = ["bad.toml"]\nunlisted = "lower"\n')
    status, out, err = run(capsys, "check", str(bad), mine, str(worse))
    places = [line.removeprefix(f"{tmp_path}/").partition(": ")[0] for line in out.splitlines()]
    assert (status, err) == (1, "")
    assert places == ["bad.toml:10", "bad.toml:25", "worse.toml:2", f"{mine}".removeprefix(f"{tmp_path}/")]
    assert run(capsys, "check", mine, "cuda-float16") == (0, f"{mine}: no mistakes\ncuda-float16: no mistakes\n", "")


def test_a_table_is_checked_as_a_part(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = tmp_path / "table.toml"
    table.write_text('[[rule]]\nid = "matrix-products"\nenabled = false\n')
    assert run(capsys, "check", str(table))[0] == 1
    assert run(capsys, "check", "--part", str(table)) == (0, f"{table}: no mistakes\n", "")
    table.write_text('[[rule]]\nid = "matrix-products"\nenabled = 1\n')
    assert run(capsys, "check", "--part", str(table))[0] == 1


def test_show_prints_a_policy_with_origins(capsys: pytest.CaptureFixture[str], mine: str) -> None:
    status, out, err = run(capsys, "show", mine, "--torch", "2.13.0")
    assert status == 0 and "[match] cpu_features avx2: not checked" in err
    assert Policy.loads(out) == Policy.load(mine).resolve(torch_version="2.13.0")
    lines = out.splitlines()
    assert f'unlisted = "promote"  # {mine}:3' in lines and 'outputs = "captured"  # default' in lines
    assert lines[lines.index('id = "big-sums"') - 1] == f"[[rule]]  # {mine}:6"
    assert any(line.startswith("[[rule]]  # policies/cpu.toml:") for line in lines)
    assert 'id = "linear-algebra-until-2.13"' in lines
    assert 'id = "linear-algebra-until-2.13"' not in run(capsys, "show", mine, "--torch", "2.14")[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mm"], ["aten::mm in the forward", "decides   matrix-products", "unknown   head", "the module is not known"]),
        (
            ["mm", "--module", "net.head"],
            ["decides   head: fp32", "argument weight: follow", "lost      matrix-products"],
        ),
        (
            ["mm", "--module", "body"],
            ["decides   matrix-products", "kept out  head", "module 'body' is not covered by head"],
        ),
        (["mm", "--region", "backward", "--module", "head"], ["in the backward", "decides   head"]),
        (["mm", "--region", "backward", "--module", "x"], ["it runs in the dtypes that follow from its forward"]),
        (["relu", "--module", "x"], ["decides   unlisted: promote", "says unlisted = 'promote'"]),
        (["mean", "--reduces", "5000"], ["decides   big-sums", "Many small values."]),
        (["mean", "--reduces", "8"], ["kept out  big-sums", "reduced to one is 8, not >4096"]),
        (["mean"], ["unknown   big-sums", "reduced to one is not known"]),
        (["sum", "--arg", "dim=-1", "--arg", "self.size=200", "--arg", "self.dtype=float32"], ["decides   last-sums"]),
        (["sum", "--arg", "dim=-1", "--arg", "self.shape=4,50"], ["unknown   last-sums", "the dtype of self is not"]),
        (["sum", "--arg", "dim=0"], ["kept out  last-sums", "dim is 0, not -1"]),
        (["sum", "--arg", "dim=[-1]"], ["unknown   last-sums", "argument 'self' is not known"]),
        (["sum.dim_IntList", "--reduces", "9000"], ["decides   big-sums"]),
    ],
)
def test_explain_shows_the_rule_that_decides_and_why_the_others_do_not(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str], mine: str
) -> None:
    status, out, _ = run(capsys, "explain", *arguments, "--policy", mine)
    assert status == 0
    assert [word for word in words if word not in out] == [], out


def test_explain_takes_every_spelling_of_an_op(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run(capsys, "explain", op, "--policy", "cuda-float16") for op in ("linear", "aten::linear", "aten.linear")]
    assert runs[0][0] == 0 and runs[0] == runs[1] == runs[2]
    runs = [run(capsys, "explain", op, "--policy", "cuda-float16") for op in ("linear.default", "aten.linear.default")]
    assert runs[0][0] == 0 and runs[0] == runs[1]


def test_explain_shows_overloads_and_the_nearest_op(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "explain", "softmax", "--policy", "cuda-float16", "--torch", "2.12")[1]
    assert "aten::softmax.int in the forward" in out and "aten::softmax.Dimname in the forward" in out
    out = run(capsys, "explain", "layer_nrm", "--policy", "cuda-float16")[1]
    assert "no rule covers it: it follows its inputs (did you mean 'aten::layer_norm'?)" in out


def test_list_describes_each_shipped_policy(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "list")
    table, _, _ = out.partition("\n\n")
    listed = {line.split()[0]: line.split() for line in table.splitlines()[2:]}
    assert status == 0 and set(listed) == {*built_in_names(), *variant_names()}
    assert all(len(words) > 3 for words in listed.values())
    assert all(words[1] == words[0].partition("-")[0] for words in listed.values())


def test_list_shows_the_costs_in_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    figures = json.loads((ROOT / "policies/figures.json").read_text())
    _, out, _ = run(capsys, "list")
    table, _, about = out.partition("\n\n")
    for line in table.splitlines()[2:]:
        ratios = [f"{ratio:.2f}" for ratio in figures["policies"][line.split()[0]].values()]
        words = [word for word in line.split()[2:] if re.fullmatch(r"\d+\.\d\d", word)]
        assert words == ratios, line
    assert " ".join(about.split()) == f"{figures['about']} Made by fxamp-bench policies."


def test_every_policy_has_the_figures_of_its_device() -> None:
    figures = json.loads((ROOT / "policies/figures.json").read_text())["policies"]
    keys = {"cuda": {"bytes", "kept", "peak"}, "cpu": {"error"}}
    for name in (*built_in_names(), *variant_names()):
        assert set(figures[name]) == keys.get(name.partition("-")[0], set()), f"{name}: run fxamp-bench policies"
    assert set(figures) == {*built_in_names(), *variant_names()}


def test_list_of_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "list", "--device", "xpu")
    assert [line.split()[0] for line in out.splitlines()[2:]] == ["xpu-bfloat16", "xpu-float16"]


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys)[0] == 2
    status, out, _ = run(capsys, "--help")
    assert status == 0 and all(name in out for name in ("check", "show", "explain"))
