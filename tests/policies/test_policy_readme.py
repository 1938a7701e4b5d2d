"""The pages of policies/ are complete and right: what they say loads and decides so, every key is there."""

import re
from pathlib import Path

import pytest

from fxamp.policy import Category, LossScale, Policy, Site, TensorFacts, built_in_names, variant_names
from fxamp.policy.file import schema
from fxamp.policy.file.paths import folder
from fxamp.policy.model.cast_rule import INPUT_DTYPES
from fxamp.policy.model.conditions import CHECKS
from fxamp.tools.policy.command import main

README = (folder() / "README.md").read_text()
BEYOND = (folder() / "BEYOND_CASTS.md").read_text()
SHIPPED = (folder() / "SHIPPED.md").read_text()
TABLES = (schema.FILE_KEYS, *schema.TABLES.values(), schema.RULE_KEYS)
EXAMPLES = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)


def decided(site: Site) -> str | None:
    rule = Policy.loads(EXAMPLES[1]).resolve("cpu").ruling(site).rule
    return rule.id if rule else None


def test_the_second_example_decides_what_its_comments_say() -> None:
    long, short = (TensorFacts("float32", (2, last)) for last in (2048, 64))
    assert decided(Site("aten::relu.default", "model.lm_head")) == "careful-head"
    assert decided(Site("aten::linear.default", "layers.0.router.proj")) == "careful-head"
    assert decided(Site("aten::linear.default", "layers.1.router")) == "matrix-products"
    assert decided(Site("aten::mean.dim", reduces=5000)) == "long-sums"
    assert decided(Site("aten::mean.dim", reduces=50)) is None
    assert decided(Site("aten::softmax.int", args={"dim": -1, "self": long})) == "wide-softmax"
    assert decided(Site("aten::softmax.int", args={"dim": -1, "self": short})) is None
    assert decided(Site("aten::softmax.int", args={"dim": 0, "self": long})) is None
    assert decided(Site("aten::layer_norm.default", "", ("torch.nn.modules.normalization.LayerNorm",))) == "half-norms"
    assert decided(Site("aten::mm.default", region="backward")) == "exact-weight-gradients"
    assert decided(Site("aten::addmm.default", region="kept", elements=4096)) == "kept-products"
    assert decided(Site("aten::addmm.default", region="kept", elements=4095)) is None
    assert decided(Site("aten::fake_quantize_per_tensor_affine.default")) is None
    assert Policy.loads(EXAMPLES[1]).loss_scale == LossScale(1024.0, min_scale=1.0)


def test_every_key_is_documented() -> None:
    keys = {*CHECKS, *(name for table in TABLES for name in table)}
    assert [key for key in keys if not re.search(rf"`(\[+)?{key}(\]+)?`", README)] == []


def test_every_word_is_documented() -> None:
    words = {*INPUT_DTYPES, *(word for table in TABLES for key in table.values() for word in key.choices)}
    assert [word for word in (*words, *Category) if f"`{word}`" not in README + BEYOND] == []


def test_every_policy_is_named_and_every_file_is_there() -> None:
    assert [name for name in built_in_names() if f"`{name}`" not in SHIPPED] == []
    kinds = {name.split("-", 2)[2] for name in variant_names()}
    assert set(re.findall(r"`cuda-bfloat16-([\w-]+)`", SHIPPED)) == kinds
    assert [
        name
        for name in re.findall(r"`([a-z\d-]+\.(?:toml|json))`", README + BEYOND + SHIPPED)
        if not (folder() / name).is_file()
    ] == []


def test_its_commands_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my-policy.toml").write_text(EXAMPLES[0])
    commands = re.findall(r"^    fxamp-policy ([^#\n]+)", README, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["check", "show", "explain"]
    for command in commands:
        assert main(command.split()) == 0
    assert "decides   norm-layers: lower_precision_fp  (my-policy.toml:8)" in capsys.readouterr().out
