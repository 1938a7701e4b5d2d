"""Rules on what is kept for the backward: which value they cover, what they refuse, and how they differ."""

from pathlib import Path

import pytest

from fxamp.policy import CastRule, KeepRule, Policy, Rule, Site
from fxamp.policy.diff.policy_diff import diff_policies
from fxamp.policy.model.keep_rule import Keep
from fxamp.tools.diff.words import groups
from fxamp.tools.policy.command import main

TEXT = """
extends = ["cuda-bfloat16"]

[[rule]]
id = "large"
keep = "int8"
region = "kept"
elements = ">=4096"

[[rule]]
id = "attended"
keep = "as-is"
region = "kept"
ops = ["mm", "view"]
read_by = ["*attention*"]
why = "Probabilities must add up to one."
"""

POLICY = Policy.loads(TEXT).resolve("cuda")


def decided(op: str, **facts: object) -> tuple[str, int] | None:
    rule = POLICY.ruling(Site(op, region="kept", **facts)).rule  # type: ignore[arg-type]
    return None if rule is None else (rule.asks, rule.block)


def test_size_and_readers_decide() -> None:
    attention = "aten::_scaled_dot_product_flash_attention.default"
    assert decided("aten::mm.default", elements=4096) == ("int8", 128)
    assert decided("aten::mm.default", elements=4095) is None
    assert decided("aten::mm.default") is None
    assert decided("aten::mm.default", elements=4096, readers=("aten::add.Tensor", attention)) == ("as-is", 0)
    assert decided("aten::add.Tensor", elements=4096, readers=(attention,)) == ("int8", 128)


def test_rules_of_regions_do_not_mix() -> None:
    assert {rule.region for rule in POLICY.rules} == {"forward", "kept"}
    assert POLICY.has_rules_for("kept") and not POLICY.has_rules_for("backward")
    both = Policy.loads(TEXT + '[[rule]]\nid = "wide"\ncast = "fp32"\nregion = "both"\nops = ["mm"]\n')
    for policy in (POLICY, both):
        for region in ("forward", "backward"):
            rule = policy.ruling(Site("aten::mm.default", region=region, elements=9999)).rule
            assert rule is None or isinstance(rule, CastRule)
        rule = policy.ruling(Site("aten::mm.default", region="kept", elements=9999)).rule
        assert isinstance(rule, KeepRule) and rule.keep is Keep.INT8
    assert not POLICY.conditional, "a condition on kept values is no condition on an op of the forward"


def test_the_digest_knows_every_key() -> None:
    edits = [("int8", "float8_e5m2"), (">=4096", ">=4097"), ('"as-is"', '"recompute"'), ("*attention*", "*attn*")]
    digests = {Policy.loads(TEXT.replace(*edit)).digest for edit in [("", ""), *edits]}
    assert len(digests) == 1 + len(edits)
    assert Policy.loads(TEXT.replace('"int8"', '"int8"\nblock = 128')) == Policy.loads(TEXT)
    assert Policy.loads(POLICY.dumps()).resolve("cuda") == POLICY


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"region": "kept"}, "has no keep"),
        ({}, "has no cast"),
        (
            {"keep": "int8", "region": "forward"},
            "region = 'forward' does not go with keep; accepted: 'kept'",
        ),
        ({"region": "kept", "keep": "recompute", "ops": ("bernoulli",)}, "draws random numbers"),
        ({"region": "kept", "keep": "as-is", "block": 64}, "block goes with keep = 'int8' or"),
    ],
)
def test_a_rule_made_in_python_is_checked(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"rule 'a': .*{message}"):
        Rule("a", **fields)  # type: ignore[arg-type]


def test_fxamp_diff_shows_what_is_saved_differently() -> None:
    plain, smaller = Policy.load("cuda-bfloat16").resolve(), Policy.loads(TEXT.replace("int8", "float8_e5m2")).resolve()
    assert not diff_policies(plain, POLICY).same and diff_policies(POLICY, POLICY).same
    headings = [group.heading for group in groups(diff_policies(POLICY, smaller).ops)]
    assert headings == [
        "int8 -> float8_e5m2, kept for the backward, of >=4096 elements",
    ]
    assert {change.region for change in diff_policies(plain, POLICY).ops} == {"kept"}
    assert not diff_policies(POLICY, Policy.loads(TEXT.replace('"int8"', '"int8"\nblock = 64')).resolve()).same


def test_explain_takes_the_facts_of_a_kept_value(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "kept.toml").write_text(TEXT)
    arguments = ["explain", "mm", "--policy", str(tmp_path / "kept.toml"), "--region", "kept", "--elements", "5000"]
    assert main(arguments) == 0
    assert "decides   large: int8" in capsys.readouterr().out
    assert main([*arguments, "--read-by", "my_attention"]) == 0
    output = capsys.readouterr().out
    assert "decides   attended: as-is" in output and "lost      large: int8" in output
