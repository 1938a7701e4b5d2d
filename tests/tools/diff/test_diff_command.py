"""The command ``fxamp-diff``: formats, exit statuses and terminals."""

import json
import re
from pathlib import Path

import pytest
from support.checks.exhaustive import exhaustive
from support.checks.golden_text import assert_golden

from fxamp.policy import Policy
from fxamp.policy.file.shipped import variant_names
from fxamp.tools.common.terminal import Look
from fxamp.tools.diff.command import FORMATS, main
from fxamp.tools.diff.result import compare
from fxamp.tools.diff.sides import load_side
from fxamp.tools.diff.text import text_lines

ROOT = Path(__file__).parents[3]

TEAM = """
extends = ["cuda-float16.toml"]
outputs = "keep"

[match]
capability = ">=8.0"

[loss_scale]
init_scale = 1024.0
max_scale = 65536.0

[[rule]]
id = "norm-layers"
cast = "lower_precision_fp"
ops = ["layer_norm", "group_norm"]
inputs = { weight = "fp32", bias = "fp32" }
why = "Small inputs."

[[rule]]
id = "prelu"
enabled = false

[[rule]]
id = "head"
cast = "fp32"
modules = ["lm_head"]

[[rule]]
id = "long-sums"
cast = "fp32"
ops = ["sum", "mylib::*"]
reduces = ">4096"

[[rule]]
id = "weight-gradients"
cast = "fp32"
ops = ["mm"]
region = "backward"
"""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("team.toml").write_text(TEAM)


#: The torch that the golden texts are for: built-in policies have rules for some versions only.
TORCH = ["--torch", "2.13"]


@pytest.mark.parametrize(
    ("name", "format", "old", "new"),
    [
        ("team", "text", "cuda-float16", "team.toml"),
        ("team", "markdown", "cuda-float16", "team.toml"),
        ("dtypes", "text", "cuda-float16", "cuda-bfloat16"),
        ("dtypes", "markdown", "cuda-float16", "cuda-bfloat16"),
        ("dtypes", "json", "cuda-float16", "cuda-bfloat16"),
        ("norms", "json", "cuda-float16", "cuda-float16-fast-norms"),
    ],
)
def test_formats(name: str, format: str, old: str, new: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([old, new, "--format", format, *TORCH]) == 1
    out, err = capsys.readouterr()
    assert_golden(f"diff/{name}-{format}", re.sub(r"(policies/[\w-]+\.toml):\d+", r"\1:N", out))
    assert err == ""


#: One policy of each variant but the longest ones, whatever its device and dtype.
VARIANTS = {name.split("-", 2)[2]: name for name in variant_names() if "lean" not in name}


@pytest.mark.parametrize("variant", exhaustive(variant_names(), always=[*VARIANTS.values()][::2]))
def test_every_shipped_variant_differs_from_what_it_varies(variant: str, capsys: pytest.CaptureFixture[str]) -> None:
    policy = Policy.load(variant)
    base = f"{policy.device}-{policy.lower_precision_fp}"
    for format in FORMATS:
        assert main([base, variant, "--format", format, *TORCH]) == 1
        out, err = capsys.readouterr()
        assert variant in out and err == ""
        if policy.optimizer is not None:
            assert "optimizer.state" in out


def test_json_holds_every_op_and_rule(capsys: pytest.CaptureFixture[str]) -> None:
    main(["cuda-float16", "cpu-float16", "--format", "json", *TORCH])
    written = json.loads(capsys.readouterr().out)
    comparison = compare(load_side("cuda-float16", None, "2.13"), load_side("cpu-float16", None, "2.13"))
    assert [op["op"] for op in written["ops"]] == [change.op for change in comparison.diff.ops]
    assert [rule["id"] for rule in written["rules"]] == [change.id for change in comparison.diff.rules]
    assert written["same"] is False


@pytest.mark.parametrize("format", ["text", "json", "markdown"])
def test_the_same(format: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cuda-float16", "cuda-float16", "--format", format]) == 0
    out = capsys.readouterr().out
    assert "the same: nothing is decided differently" in out.lower() or json.loads(out)["same"] is True


def test_renamed_rules_are_named_and_are_no_difference(capsys: pytest.CaptureFixture[str]) -> None:
    Path("new.toml").write_text(TEAM.replace('"head"', '"top"'))
    assert main(["team.toml", "new.toml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "~ top  renamed from head  [team.toml:23 -> new.toml:23]" in lines
    assert lines[-1] == "the same: nothing is decided differently; 1 rule written differently"


def test_op_tables_are_compared_too(capsys: pytest.CaptureFixture[str]) -> None:
    table = str(ROOT / "policies" / "accelerators.toml")
    assert main([table, table]) == 0
    Path("table.toml").write_text('[[rule]]\nid = "a"\ncast = "fp32"\nops = ["mm"]\n')
    assert main(["table.toml", table, *TORCH]) == 1
    assert "lower_precision_fp" not in capsys.readouterr().out.split("rules\n")[0]
    assert main(["table.toml", "cuda-float16", *TORCH]) == 1
    assert "~ device              not set -> cuda" in capsys.readouterr().out
    assert main(["table.toml", "cpu-float16", "--device", "cpu", *TORCH]) == 1
    assert "~ device" not in capsys.readouterr().out


def test_versions_of_torch(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rms.toml").write_text('extends = ["cuda-float16.toml"]\n[[rule]]\nid = "rms-norm"\nenabled = false\n')
    assert main(["cuda-float16", "rms.toml", "--torch", "2.11"]) == 0
    assert main(["cuda-float16", "rms.toml", "--torch", "2.12"]) == 1
    assert "1 op decided differently" in capsys.readouterr().out


def test_it_fits_a_width_and_wraps_between_words() -> None:
    comparison = compare(load_side("cuda-float16", None, "2.13"), load_side("cpu-float16", None, "2.13"))
    wide, narrow = ("\n".join(text_lines(comparison, Look(width))) for width in (None, 72))
    assert max(map(len, narrow.splitlines())) <= 72
    assert narrow.split() == wide.split()


def test_colours_mark_the_signs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    main(["cuda-float16", "team.toml", *TORCH])
    out = capsys.readouterr().out
    for start in ("\x1b[32m+ head", "\x1b[31m- prelu", "\x1b[33m~ norm-layers", "\x1b[35m! loss_scale.init_scale"):
        assert start in out
    monkeypatch.setenv("NO_COLOR", "1")
    main(["cuda-float16", "team.toml", *TORCH])
    assert "\x1b" not in capsys.readouterr().out


def test_markdown_is_not_fooled_by_names(capsys: pytest.CaptureFixture[str]) -> None:
    Path("odd.toml").write_text(TEAM.replace('"head"', '"a|b`c<i>*"'))
    main(["cuda-float16", "odd.toml", "--format", "markdown", *TORCH])
    out = capsys.readouterr().out
    assert "| ``a\\|b`c<i>*`` |" in out
    assert "any op -&gt; fp32 by a\\|b\\`c&lt;i&gt;\\*, in lm\\_head" in out


def test_every_mistake_of_a_policy_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken.toml").write_text('extends = ["cuda-float16.toml"]\ncasts = "fp32"\noutputs = "kept"\n')
    assert main(["broken.toml", "cuda-float16"]) == 2
    assert [line.partition(" ")[0] for line in capsys.readouterr().err.splitlines()][-1] == "broken.toml:3:"
